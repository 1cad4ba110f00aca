"""One flight per target copy, several of which may share it: whoever needs bytes that are already on their way waits for them instead of fetching them again.

A flight lands when its copy was committed or aborted, whichever; the waiter then asks the catalog what is there.
"""

import asyncio
from collections.abc import Iterable, Sequence


class Flights:
    """Flights by target copy row. A waiter that is cancelled or runs out of time leaves the flight as it is."""

    def __init__(self) -> None:
        self._flights: dict[int, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    def begin(self, copies: Sequence[int]) -> None:
        """One flight for all of them."""
        assert self._flights.keys().isdisjoint(copies), f"second flight for one copy: {copies=}"
        self._flights.update(dict.fromkeys(copies, asyncio.get_running_loop().create_future()))

    def land(self, copies: Sequence[int]) -> None:
        """All that began together."""
        for copy in copies:
            flight = self._flights.pop(copy)
        flight.set_result(None)

    async def wait(self, copies: Iterable[int], wait_s: float) -> bool:
        """Until every flight among `copies` landed (True) or `wait_s` passed (False). Rows without a flight have landed."""
        flights = {self._flights[copy] for copy in copies if copy in self._flights}
        if not flights:
            return True
        if wait_s <= 0:
            return False
        # asyncio.wait, unlike wait_for and gather, leaves the futures alone when it is cancelled or late
        _, late = await asyncio.wait(flights, timeout=wait_s)
        return not late
