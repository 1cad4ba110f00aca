"""How much may be written to NVMe in a day: flash wears by what is written to it.

Counted by the hour over the last 24 whole hours and the current one, so that no 24 hours see more than the budget. With hysteresis: from
`CAREFUL_SHARE` on one-hit wonders are not written, a budget that is used up is closed until some of it is free again.
"""

import json
from enum import IntEnum

from kvstored.errors import InvalidArgument

HOUR_S = 3600.0
HOURS = 25
CAREFUL_SHARE, CAREFUL_UNTIL = 0.8, 0.7
CLOSED_UNTIL = 0.95
_VERSION = 1


class WriteState(IntEnum):
    OPEN = 0
    CAREFUL = 1
    CLOSED = 2


class WriteBudget:
    """`day_bytes` 0: no bound, only counted. What is begun is spent at once, as if it could not be compressed; `refund` gives back the difference."""

    def __init__(self, day_bytes: int) -> None:
        self.day_bytes = day_bytes
        self._by_hour: dict[int, int] = {}
        self._state = WriteState.OPEN

    def spend(self, size_bytes: int, now_s: float) -> None:
        hour = int(now_s // HOUR_S)
        self._by_hour[hour] = self._by_hour.get(hour, 0) + size_bytes
        self._forget(hour)

    def settle(self, begun_bytes: int, stored_bytes: int, now_s: float) -> None:
        """What was begun as so many bytes took less, coded."""
        self.refund(max(0, begun_bytes - stored_bytes), now_s)

    def refund(self, size_bytes: int, now_s: float) -> None:
        """Of what was spent lately; never more than the hour has."""
        hour = int(now_s // HOUR_S)
        for at in (hour, hour - 1):
            back = min(size_bytes, self._by_hour.get(at, 0))
            if back:
                self._by_hour[at] -= back
                size_bytes -= back

    def spent(self, now_s: float) -> int:
        self._forget(int(now_s // HOUR_S))
        return sum(self._by_hour.values())

    def left(self, now_s: float) -> int:
        """Bytes that may be begun now."""
        if not self.day_bytes:
            return 1 << 62
        if self.state(now_s) is WriteState.CLOSED:
            return 0
        return max(0, self.day_bytes - self.spent(now_s))

    def refuse(self) -> None:
        """What is left does not suffice for what comes next: closed until some of it is free again."""
        self._state = WriteState.CLOSED

    def state(self, now_s: float) -> WriteState:
        if not self.day_bytes:
            return WriteState.OPEN
        share = self.spent(now_s) / self.day_bytes
        if share >= 1 or (self._state is WriteState.CLOSED and share >= CLOSED_UNTIL):
            self._state = WriteState.CLOSED
        else:
            was_careful = self._state is not WriteState.OPEN
            careful = share >= (CAREFUL_UNTIL if was_careful else CAREFUL_SHARE)
            self._state = WriteState.CAREFUL if careful else WriteState.OPEN
        return self._state

    def dump(self) -> str:
        """For the next start, with the state: a restart opens nothing that was closed."""
        hours = {str(hour): size for hour, size in sorted(self._by_hour.items())}
        return json.dumps({"version": _VERSION, "state": int(self._state), "hours": hours})

    def load(self, text: str, now_s: float) -> None:
        """Go on from a dump; `InvalidArgument` with nothing changed where it is none."""
        try:
            given = json.loads(text)
            hours = {int(hour): int(size) for hour, size in given["hours"].items()}
            state = WriteState(given["state"])
            is_fine = given["version"] == _VERSION and min(hours.values(), default=0) >= 0
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"no written bytes by the hour: error={error!r}") from error
        if not is_fine:
            raise InvalidArgument(f"written bytes of another version: version={given['version']}")
        self._by_hour, self._state = hours, state
        self._forget(int(now_s // HOUR_S))

    def _forget(self, hour: int) -> None:
        """Hours that are over, and those that a clock which was wrong left in the future."""
        for at in [at for at in self._by_hour if not hour - HOURS < at <= hour + 1]:
            del self._by_hour[at]
