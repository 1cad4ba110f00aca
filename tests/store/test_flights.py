"""Flights: later callers wait for the first, and waiting changes nothing."""

import asyncio

import pytest

from kvstored.store.flights import Flights


def test_waiters_are_told_when_every_flight_has_landed() -> None:
    async def main() -> None:
        flights = Flights()
        flights.begin([1])
        flights.begin([2])
        waiters = [asyncio.ensure_future(flights.wait([1, 2, 3], 5.0)) for _ in range(3)]
        await asyncio.sleep(0)
        flights.land([1])
        await asyncio.sleep(0.01)
        assert not any(waiter.done() for waiter in waiters)
        flights.land([2])
        assert await asyncio.gather(*waiters) == [True] * 3
        assert len(flights) == 0

    asyncio.run(main())


def test_a_late_or_cancelled_waiter_leaves_the_flight_alone() -> None:
    async def main() -> None:
        flights = Flights()
        flights.begin([1])
        assert await flights.wait([1], 0.01) is False
        assert await flights.wait([1], 0.0) is False
        waiter = asyncio.ensure_future(flights.wait([1], 60.0))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert len(flights) == 1
        flights.land([1])
        assert await flights.wait([1], 0.0) is True

    asyncio.run(main())
