"""Whether the daemon is asked at all. Pure books of failures; who owns it locks."""

from enum import StrEnum

TIMEOUTS_MAX = 3
"""Lookups without an answer in time, one after the other, that mean a daemon that hangs."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.1, 2.0


class State(StrEnum):
    AWAY = "away"
    """Not reached yet, or lost: calls are misses, the background tries to reach it."""
    UP = "up"
    OFF = "off"
    """Refused: nothing is tried any more."""


class Breaker:
    def __init__(self) -> None:
        self.state = State.AWAY
        self._timeouts = 0
        self._tries = 0

    def reached(self) -> None:
        assert self.state is State.AWAY, "only what is away comes back"
        self.state = State.UP
        self._timeouts = self._tries = 0

    def answered(self) -> None:
        self._timeouts = 0

    def timed_out(self) -> bool:
        """Whether this one too many made it away."""
        self._timeouts += 1
        return self._timeouts >= TIMEOUTS_MAX and self.lost()

    def lost(self) -> bool:
        """Whether it was up before."""
        if self.state is not State.UP:
            return False
        self.state = State.AWAY
        return True

    def refused(self) -> None:
        self.state = State.OFF

    def next_try_s(self) -> float:
        """How long to wait before the next try: twice as long each time, up to a bound."""
        wait_s = min(BACKOFF_FIRST_S * 2.0 ** min(self._tries, 16), BACKOFF_MAX_S)
        self._tries += 1
        return wait_s
