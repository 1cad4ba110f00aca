"""How much of a link the daemon's own copies may take, and what of it callers have reserved for theirs: a token bucket. Pure.

Copies that an engine waits for may run up a debt, which those in the background wait out: so demand overtakes without a queue of its own.
"""

BURST_S = 0.02
"""What an idle link lets through at once, and what demand may owe at most is ten times that."""
DEBT_S = 10 * BURST_S
SHARE_MIN = 0.05
"""Of the bandwidth that reservations cannot take: a daemon that may copy nothing can serve nothing."""
RESERVE_S_MAX = 60.0


class Bandwidth:
    """`bytes_per_s`: 0 for no bound. Every call is told the time, which never goes back."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._level = BURST_S * bytes_per_s
        self._since_s = 0.0
        self._reserved: dict[int, tuple[int, float]] = {}

    def reserve(self, owner: int, bytes_per_s: int, ttl_s: float, now_s: float) -> int:
        """Leave so much to the owner's own transfers, in place of what it reserved before; what is left, 0 without a bound."""
        self._refill(now_s)
        self._reserved.pop(owner, None)
        if bytes_per_s:
            self._reserved[owner] = bytes_per_s, now_s + min(ttl_s, RESERVE_S_MAX)
        return int(self._rate(now_s))

    def take_demand(self, size_bytes: int, now_s: float) -> float:
        """0 when the copy may begin, which takes its bytes; else seconds after which to ask again."""
        return self._take(size_bytes, -DEBT_S, now_s)

    def take_background(self, size_bytes: int, now_s: float) -> float:
        """The same for a copy that nobody waits for."""
        return self._take(size_bytes, 0.0, now_s)

    def _take(self, size_bytes: int, floor_s: float, now_s: float) -> float:
        """May begin above the floor, whatever its size: one that is larger than a burst could never begin else."""
        if not self._bytes_per_s:
            return 0.0
        self._refill(now_s)
        rate = self._rate(now_s)
        floor = floor_s * rate
        if self._level > floor:
            self._level -= size_bytes
            return 0.0
        return (floor - self._level) / rate + 1e-3

    def _refill(self, now_s: float) -> None:
        rate = self._rate(now_s)
        self._level = min(BURST_S * rate, self._level + rate * max(0.0, now_s - self._since_s))
        self._since_s = now_s

    def _rate(self, now_s: float) -> float:
        for owner in [o for o, (_, until_s) in self._reserved.items() if until_s <= now_s]:
            del self._reserved[owner]
        taken = sum(bytes_per_s for bytes_per_s, _ in self._reserved.values())
        return max(SHARE_MIN * self._bytes_per_s, float(self._bytes_per_s - taken))
