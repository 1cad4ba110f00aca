"""Lanes: bounded, demand first, and nothing is freed because an await was cancelled."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from kvstored.errors import Busy, NoSpace
from kvstored.store.lane import Lane, Urgency


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("test", threads=1, queue_max=4)
    yield lane
    lane.close()


def run(coroutine: object) -> None:
    asyncio.run(coroutine)  # type: ignore[arg-type]  # any coroutine


async def until_taken(lane: Lane) -> None:
    while not lane.running:  # noqa: ASYNC110 - the thread tells nobody when it takes work
        await asyncio.sleep(0.001)


def test_a_result_and_an_error_reach_the_waiter(lane: Lane) -> None:
    def fail() -> None:
        raise NoSpace("full")

    async def main() -> None:
        assert await lane.submit(lambda: 7) == 7
        with pytest.raises(NoSpace):
            await lane.submit(fail)

    run(main())


def test_a_full_lane_is_busy_and_keeps_half_of_its_queue_for_demand(lane: Lane) -> None:
    async def main() -> None:
        gate = threading.Event()
        running = [lane.submit(lambda: gate.wait(10))]
        await until_taken(lane)
        running += [lane.submit(lambda: True, Urgency.BACKGROUND) for _ in range(2)]
        with pytest.raises(Busy):
            lane.submit(lambda: True, Urgency.BACKGROUND)
        running += [lane.submit(lambda: True) for _ in range(2)]
        with pytest.raises(Busy):
            lane.submit(lambda: True)
        gate.set()
        assert all([await each for each in running])
        assert lane.queued == 0

    run(main())


def test_demand_overtakes_background(lane: Lane) -> None:
    async def main() -> None:
        gate, order = threading.Event(), list[str]()
        first = lane.submit(lambda: gate.wait(10))
        await until_taken(lane)
        later = [
            lane.submit(lambda: order.append("background"), Urgency.BACKGROUND),
            lane.submit(lambda: order.append("demand")),
        ]
        gate.set()
        await first
        for each in later:
            await each
        assert order == ["demand", "background"]

    run(main())


def test_background_never_holds_every_thread() -> None:
    lane = Lane("test", threads=2, queue_max=8)

    async def main() -> None:
        gate = threading.Event()
        held = [lane.submit(lambda: gate.wait(10), Urgency.BACKGROUND) for _ in range(2)]
        assert await asyncio.wait_for(_of(lane, 3), 5) == 3
        gate.set()
        for each in held:
            await each

    async def _of(lane: Lane, value: int) -> int:
        return await lane.submit(lambda: value)

    run(main())
    lane.close()


def test_a_cancelled_await_does_not_end_the_work_and_the_callback_comes_after_the_thread_let_go(
    lane: Lane,
) -> None:
    async def main() -> None:
        gate, wrote = threading.Event(), list[int]()
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def work() -> int:
            gate.wait(10)
            wrote.append(1)
            return 5

        running = lane.submit(work)
        running.when_ended(lambda end: ended.set_result(end.unwrap()))

        async def wait() -> None:
            await running

        waiter = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert not ended.done()
        gate.set()
        assert await ended == 5
        assert wrote == [1]

    run(main())


def test_closing_finishes_what_is_queued_and_refuses_more() -> None:
    lane = Lane("test", threads=2, queue_max=64)

    async def main() -> None:
        seen = list[int]()
        running = [lane.submit(lambda i=i: seen.append(i), Urgency.BACKGROUND) for i in range(20)]  # type: ignore[misc]  # default binds
        lane.close()
        for each in running:
            await each
        assert sorted(seen) == list(range(20))
        with pytest.raises(Busy):
            lane.submit(lambda: 1)

    run(main())
