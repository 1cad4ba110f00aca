"""Rounds that have nothing to do sleep until somebody asks for something: a daemon that nobody uses is not to be seen in `top`."""

import asyncio


class Quiet:
    def __init__(self) -> None:
        self._sleepers: list[asyncio.Future[None]] = []

    def broken(self) -> None:
        """A message is there."""
        sleepers, self._sleepers = self._sleepers, []
        for each in sleepers:
            _set(each)

    async def until_broken(self, most_s: float) -> None:
        """Or `most_s` passed."""
        loop = asyncio.get_running_loop()
        sleeper = loop.create_future()
        self._sleepers.append(sleeper)
        alarm = loop.call_later(most_s, self._wake, sleeper)
        try:
            await sleeper
        finally:
            alarm.cancel()

    def _wake(self, sleeper: asyncio.Future[None]) -> None:
        if sleeper in self._sleepers:  # else it was woken in this turn of the loop
            self._sleepers.remove(sleeper)
            _set(sleeper)


def _set(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
