"""Staying awake between messages that follow each other closely: asleep, each costs a wake-up, which takes longer than most calls."""

import os
from collections.abc import Callable

from kvstored.clock import Clock


class BusyPoll:
    """Keeps a loop turning for `window_s` after an answer, if the message before came within that of the answer before it: who calls now and
    then costs nothing. Every turn offers the core to whoever is ready. 0: never.
    """

    def __init__(self, window_s: float, clock: Clock) -> None:
        self.window_s = window_s
        self._clock = clock
        self._answered_s = clock.elapsed_s() - window_s
        self._pays = False
        self._is_turning = False

    def received(self) -> None:
        """A message is there."""
        self._pays = self._clock.elapsed_s() - self._answered_s < self.window_s

    def answered(self, call_soon: Callable[..., object]) -> None:
        """`call_soon`: the loop's."""
        self._answered_s = self._clock.elapsed_s()
        if self._pays and not self._is_turning:
            self._is_turning = True
            call_soon(self._turn, call_soon)

    def _turn(self, call_soon: Callable[..., object]) -> None:
        self._is_turning = self._clock.elapsed_s() - self._answered_s < self.window_s
        if self._is_turning:
            os.sched_yield()
            call_soon(self._turn, call_soon)
