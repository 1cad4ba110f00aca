"""Rounds without work sleep until a message; none sleeps while there is work, or longer than it may."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from kvstored.store import janitor
from kvstored.store.quiet import Quiet

from .world import World, keys_of, running


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_all_sleepers_wake_with_the_first_message_and_late_alarms_find_nobody() -> None:
    async def main() -> None:
        quiet, woken = Quiet(), []

        async def sleeper(i: int) -> None:
            await quiet.until_broken(60)
            woken.append(i)

        async with asyncio.TaskGroup() as tasks:
            for i in range(3):
                tasks.create_task(sleeper(i))
            await turns()
            assert not woken
            waiting = quiet._sleepers[0]
            quiet.broken()
            quiet._wake(waiting)
        assert sorted(woken) == [0, 1, 2]
        assert not quiet._sleepers

    asyncio.run(main())


def test_nobody_sleeps_longer_than_it_may_and_who_is_cancelled_is_woken_in_vain() -> None:
    async def main() -> None:
        quiet = Quiet()
        await quiet.until_broken(0.001)
        assert not quiet._sleepers
        task = asyncio.ensure_future(quiet.until_broken(60))
        await turns()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        quiet.broken()

    asyncio.run(main())


def test_rounds_without_work_come_with_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    world.grow()
    for pause in ("EVICT_S", "WRITE_BACK_S", "PAGE_IN_S", "RESIDENT_S"):
        monkeypatch.setattr(janitor, pause, 0)
    monkeypatch.setattr(janitor, "IDLE_S", 60)
    names = {
        "evictor": "make_room_once",
        "write-back": "gather_once",
        "page-in": "page_in_once",
        "residents": "judge_once",
    }
    rounds = dict.fromkeys(names, 0)

    async def main() -> None:
        for name, round_ in names.items():

            async def counted(name: str = name) -> None:
                rounds[name] += 1

            counted.__name__ = round_
            monkeypatch.setattr(world.janitor, round_, counted)
        every = world.janitor.tasks()
        running_ = [asyncio.ensure_future(every.pop(name)) for name in names]
        for other in every.values():
            other.close()
        await turns(50)
        first = dict(rounds)
        assert all(first.values())
        await turns(50)
        assert rounds == first, "asleep"
        world.store.quiet.broken()
        await turns(50)
        assert rounds == {name: count + 1 for name, count in first.items()}
        layout, session = await world.open(), world.session()
        world.put(session, layout, range(2))
        ns, names_ = layout.id, keys_of(layout, range(2)).fingerprints
        world.store.accesses.residents.report(session.core, ns, names_, world.shell.now_s() + 60)
        world.store.quiet.broken()
        before = dict(rounds)
        await turns(50)
        assert rounds["write-back"] > before["write-back"] + 5, "something is dirty"
        assert rounds["residents"] > before["residents"] + 5, "a set is to be judged"
        assert rounds["page-in"] == before["page-in"] + 1
        for task in running_:
            task.cancel()
        await asyncio.wait(running_)

    running(world, main)


def test_rounds_that_have_nothing_to_do_do_not_make_the_books_of_puts(tmp_path: Path) -> None:
    """They come hundreds of times a second, and books cost less for many puts at once."""
    world, made = World(tmp_path), list[str]()
    world.grow()

    async def main() -> None:
        world.shell.unsettled.append(lambda: made.append("books"))
        await world.janitor.page_in_once()
        assert world.janitor._wants_nothing()
        assert not world.janitor._dirty_bytes()
        assert not world.janitor._is_clean(), "what was put is dirty"
        assert not made
        world.shell.settle()

    running(world, main)


def test_a_fault_in_what_was_left_undone_costs_neither_the_rest_nor_who_looks_next(
    tmp_path: Path,
) -> None:
    world, done = World(tmp_path), list[str]()
    world.grow()

    def faulty() -> None:
        raise KeyError("a fault")

    async def main() -> None:
        world.shell.unsettled += [faulty, lambda: done.append("books")]
        assert world.shell.catalog is world.catalog
        assert done == ["books"]
        assert [type(error) for _, error in world.faults] == [KeyError]
        world.faults.clear()

    running(world, main)
