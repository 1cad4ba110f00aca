"""The time, passed in: the core takes `now_s` with every call, the shell gets a Clock.

The one module that reads a clock. Wall seconds, because records carry the time of last use over a restart.
"""

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Wall seconds since 1970."""
        ...

    def elapsed_s(self) -> float:
        """Seconds since some fixed moment, fine enough to time microseconds; a loop's own time may count whole milliseconds."""
        ...


class SystemClock:
    """Wall time that never steps back within this process: an administrator's correction must not revive what expired."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def now_s(self) -> float:
        self._last_s = max(self._last_s, time.time())
        return self._last_s

    def elapsed_s(self) -> float:
        return time.perf_counter()


class ManualClock:
    """Time that moves only when told to."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def elapsed_s(self) -> float:
        return self._now_s

    def advance(self, seconds_s: float) -> None:
        assert seconds_s >= 0, "time does not go back"
        self._now_s += seconds_s
