"""The ring of events: numbered, resumable, and honest about what was lost."""

import asyncio

from kvstored.store.events import EventKind, Events

EPOCH = 7


def events_of(count: int, *, events_max: int = 8) -> Events:
    events = Events(epoch=EPOCH, now_s=lambda: 1.0, events_max=events_max)
    for i in range(count):
        events.add(EventKind.STORED, key=bytes([i]))
    return events


def sequences(
    events: Events, epoch: int, cursor: int, events_max: int = 100
) -> tuple[list[int], int, bool]:
    polled = events.read(epoch=epoch, cursor=cursor, events_max=events_max)
    return [event.sequence for event in polled.events], polled.cursor, polled.lost


def test_a_reader_pages_through_and_goes_on_where_it_was() -> None:
    events = events_of(5)
    assert sequences(events, 0, 0, 2) == ([1, 2], 2, False)
    assert sequences(events, EPOCH, 2, 2) == ([3, 4], 4, False)
    assert sequences(events, EPOCH, 4) == ([5], 5, False)
    assert sequences(events, EPOCH, 5) == ([], 5, False)


def test_an_empty_ring_is_read_from_zero() -> None:
    assert sequences(events_of(0), 0, 0) == ([], 0, False)
    assert sequences(events_of(0), EPOCH, 0) == ([], 0, False)


def test_who_falls_behind_is_told_and_goes_on_at_the_oldest() -> None:
    events = events_of(20)
    assert sequences(events, EPOCH, 3) == (list(range(13, 21)), 20, True)
    assert sequences(events, EPOCH, 12) == (list(range(13, 21)), 20, False)
    assert sequences(events, 0, 0) == (list(range(13, 21)), 20, False)


def test_a_cursor_of_another_epoch_or_from_the_future_is_lost() -> None:
    events = events_of(3)
    assert sequences(events, EPOCH - 1, 2) == ([1, 2, 3], 3, True)
    assert sequences(events, EPOCH, 99) == ([1, 2, 3], 3, True)


def test_a_poll_waits_for_the_first_event_and_gives_up_in_time() -> None:
    async def main() -> None:
        events = events_of(1)
        late = await events.poll(epoch=EPOCH, cursor=1, events_max=9, wait_s=0.01)
        assert (late.events, late.cursor) == ((), 1)
        polls = [
            asyncio.ensure_future(events.poll(epoch=EPOCH, cursor=1, events_max=9, wait_s=30.0))
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        events.add(EventKind.EVICTED)
        for polled in await asyncio.gather(*polls):
            assert [event.sequence for event in polled.events] == [2]

    asyncio.run(main())
