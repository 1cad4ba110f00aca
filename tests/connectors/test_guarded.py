"""What an engine sees of a daemon that is there, away, killed, hung or refuses: hits or misses, never an exception or a long wait."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Busy, Client, GroupKind, GroupSpec, Keys, Match, Namespace, Unavailable
from kvstored.clock import ManualClock
from kvstored.connectors.breaker import TIMEOUTS_MAX, State
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.statistics import Stat
from tests.crash.served import Served, wait_until

from .conftest import BLOCK_BYTES, BLOCK_TOKENS, Open, spec_with

SLACK_S = 1.5
"""Of a busy machine, and the second that the client gives a daemon beyond its deadline."""


def rows_of(count: int, seed: int = 0) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).integers(0, 256, (count, BLOCK_BYTES), dtype=np.uint8))


def zeros(count: int) -> list[np.ndarray]:
    return [np.zeros(BLOCK_BYTES, dtype=np.uint8) for _ in range(count)]


def up(guarded: GuardedNamespace) -> GuardedNamespace:
    assert guarded.connected(20)
    return guarded


def totals(guarded: GuardedNamespace, *stats: Stat) -> tuple[float, ...]:
    counted = guarded.statistics.totals()
    return tuple(counted[stat] for stat in stats)


def stored(guarded: GuardedNamespace, blocks: int = 4) -> tuple[Keys, list[np.ndarray]]:
    keys, rows = guarded.keys(range(blocks * BLOCK_TOKENS)), rows_of(blocks)
    assert guarded.store_later(keys, rows) == blocks
    assert guarded.flush(20)
    return keys, rows


def test_what_is_stored_later_is_found_loaded_and_counted(served: Served, guard: Open) -> None:
    guarded = up(guard())
    keys, rows = stored(guarded)
    found = guarded.lookup(keys)
    assert (found.hit_blocks, found.hit_tokens) == (4, 4 * BLOCK_TOKENS)
    into = zeros(4)
    loaded = guarded.load(keys, into)
    assert loaded.whole == (True,) * 4
    assert all(np.array_equal(a, b) for a, b in zip(rows, into, strict=True))
    assert totals(
        guarded, Stat.STORED_BLOCKS, Stat.STORED_BYTES, Stat.LOADED_BLOCKS, Stat.LOADED_BYTES
    ) == (4, 4 * BLOCK_BYTES, 4, 4 * BLOCK_BYTES)
    assert totals(guarded, Stat.HIT_DRAM_TOKENS, Stat.OTHER_ERRORS) == (4 * BLOCK_TOKENS, 0)


def test_keys_made_without_the_daemon_are_those_of_its_namespace(
    served: Served, guard: Open
) -> None:
    made = guard().keys(range(40), extra_keys=["salt"])
    with Client(served.address) as client:
        assert client.open_namespace(spec_with()).keys(range(40), extra_keys=["salt"]) == made


def test_the_buffers_are_the_engine_s_again_when_a_store_returns(
    served: Served, guard: Open
) -> None:
    guarded = up(guard())
    keys, rows = guarded.keys(range(4 * BLOCK_TOKENS)), rows_of(4)
    before = [row.copy() for row in rows]
    guarded.store_later(keys, rows)
    for row in rows:
        row[:] = 7
    assert guarded.flush(20)
    into = zeros(4)
    assert guarded.load(keys, into).prefix == 4
    assert all(np.array_equal(a, b) for a, b in zip(before, into, strict=True))


def test_a_load_says_which_blocks_came_and_stops_at_the_first_that_did_not(
    served: Served, guard: Open
) -> None:
    guarded = up(guard())
    keys, rows = stored(guarded)
    guarded.attempt(lambda namespace: namespace.remove(keys[2:3]), 0)
    into = zeros(4)
    loaded = guarded.load(keys, into)
    assert loaded.prefix == 2
    assert loaded.whole[:3] == (True, True, False)
    assert np.array_equal(into[1], rows[1])
    assert totals(guarded, Stat.LOAD_MISSED_BLOCKS)[0] >= 1


def test_several_groups_go_together(served: Served, guard: Open) -> None:
    groups = [
        GroupSpec("full", GroupKind.LINEAR, BLOCK_BYTES),
        GroupSpec("window", GroupKind.WINDOW, 4096, window_tokens=20, per_block=True),
    ]
    guarded = up(guard(spec_with(groups=groups, model="hybrid")))
    names = ["full", "window"]
    keys = guarded.keys(range(3 * BLOCK_TOKENS))
    rows = [[full, full[:4096]] for full in rows_of(3)]
    assert guarded.store_later(keys, rows, groups=names) == 3
    assert guarded.flush(20)
    found = guarded.lookup(keys)
    assert (found.hit_tokens, found.checkpoint_tokens) == (48, 48)
    into = [[np.zeros(BLOCK_BYTES, np.uint8), np.zeros(4096, np.uint8)] for _ in range(3)]
    assert guarded.load(keys, into, groups=names).filled == ((True, True),) * 3
    assert np.array_equal(into[2][1], rows[2][1])


def test_an_absent_daemon_is_a_miss_at_once_and_is_found_when_it_comes(
    folder: Path, guard: Open, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = guard()
    keys, rows = guarded.keys(range(64)), rows_of(4)
    assert not guarded.connected(0.5)
    began_s = time.perf_counter()
    for _ in range(50):
        assert guarded.lookup(keys).hit_blocks == 0
        assert guarded.load(keys, zeros(4)).prefix == 0
        assert guarded.store(keys, rows) == (False,) * 4
        assert guarded.store_later(keys, rows) == 0
    assert time.perf_counter() - began_s < SLACK_S
    assert totals(guarded, Stat.SHED_AWAY_BLOCKS) == (50 * 8,)
    assert [r.levelno for r in caplog.records] == [logging.WARNING], "one line an outage"
    with Served(folder, dram="64MiB", disk="0B"):
        assert guarded.connected(20)
        assert guarded.store(keys, rows) == (True,) * 4
        assert guarded.lookup(keys).hit_blocks == 4


def test_a_killed_daemon_is_a_miss_and_hits_come_back_by_themselves(
    served: Served, guard: Open, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = up(guard())
    keys, rows = stored(guarded)
    last = served.kill_daemon()
    wait_until(lambda: guarded.lookup(keys).hit_blocks == 0 and guarded.state is not State.UP, 5)
    served.answered(last.epoch)
    assert guarded.connected(20)
    wait_until(lambda: guarded.lookup(keys).hit_blocks == 4, what="DRAM is warm")
    into = zeros(4)
    assert guarded.load(keys, into).prefix == 4
    assert all(np.array_equal(a, b) for a, b in zip(rows, into, strict=True))
    assert totals(guarded, Stat.OUTAGES) == (1,)
    told = [r.getMessage().partition(":")[0] for r in caplog.records]
    assert told == ["kvstored is there", "kvstored is away, going on without", "kvstored is there"]


def test_a_hung_daemon_costs_a_few_deadlines_and_then_nothing(served: Served, guard: Open) -> None:
    guarded = up(guard(lookup_s=0.2))
    keys, rows = stored(guarded)
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        waited_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            assert guarded.lookup(keys).hit_blocks == 0
            waited_s.append(time.perf_counter() - began_s)
        assert max(waited_s) < 0.2 + SLACK_S
        assert waited_s[0] < 1.0, "not the second that the client waits beyond it"
        assert guarded.state is State.AWAY
        began_s = time.perf_counter()
        for _ in range(100):
            guarded.lookup(keys)
            guarded.load(keys, zeros(4))
            guarded.store_later(keys, rows)
        assert time.perf_counter() - began_s < SLACK_S
    finally:
        os.kill(pid, signal.SIGCONT)
    assert guarded.connected(20)
    assert guarded.lookup(keys).hit_blocks == 4


def test_lookups_that_wait_for_a_connection_all_their_time_are_late_too(
    served: Served, guard: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them connects to the daemon that hangs; the others heard Busy at their deadline, which told nothing: it took a second longer."""
    guarded, clock = up(guard(lookup_s=5.0)), ManualClock()

    def match(_: Namespace, keys: Keys, *, timeout_s: float) -> Match:
        clock.advance(timeout_s)
        raise Busy("another thread is still connecting")

    monkeypatch.setattr(guarded, "_clock", clock)
    monkeypatch.setattr(Namespace, "match", match)
    for _ in range(TIMEOUTS_MAX):
        assert guarded.lookup(guarded.keys(range(BLOCK_TOKENS))).hit_blocks == 0
    assert totals(guarded, Stat.TIMEOUT_ERRORS, Stat.OUTAGES) == (TIMEOUTS_MAX, 1)


def test_a_load_from_a_daemon_that_hangs_ends(served: Served, guard: Open) -> None:
    guarded = up(guard(load_s=0.5))
    keys, rows = stored(guarded)
    guarded.lookup(keys)  # blocks are shown a moment after they were put
    absent = guarded.keys(range(1000, 1064))
    pid = served.stat().daemon_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        into = zeros(4)
        assert guarded.load(keys, into).prefix == 4, "what it shows is read without it"
        assert all(np.array_equal(a, b) for a, b in zip(rows, into, strict=True))
        began_s = time.perf_counter()
        assert guarded.load(absent, zeros(4)).prefix == 0
        assert time.perf_counter() - began_s < 0.5 + 1.0 + SLACK_S
        assert guarded.state is State.AWAY, "the next one does not wait"
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_lookup_that_runs_out_of_time_tells_the_prefix_that_it_has(
    served: Served, guard: Open
) -> None:
    guarded = up(guard())
    keys, _ = stored(guarded, 4)
    long = Keys.opaque([*keys, *guarded.keys(range(1, 2000 * BLOCK_TOKENS + 1))])
    plenty = guarded._matched
    asked: list[int] = []

    def slow(part: Keys, wait_s: float) -> object:
        asked.append(len(part))
        if len(asked) > 1:
            time.sleep(1.0)
        found = plenty(part[:4], wait_s)
        return (
            None
            if found is None
            else type(found)(len(part), len(part) * BLOCK_TOKENS, 0, 0, (0, len(part), 0, 0), "")
        )

    guarded._matched = slow  # type: ignore[method-assign]
    found = guarded.lookup(long, timeout_s=0.3)
    assert found.hit_blocks == 1024
    assert asked[0] == 1024


def test_stores_are_shed_when_the_queue_is_full_and_the_first_blocks_of_a_path_win(
    served: Served, guard: Open
) -> None:
    guarded = up(guard(queue_bytes=10 * BLOCK_BYTES))
    keys, rows = guarded.keys(range(16 * BLOCK_TOKENS)), rows_of(16)
    gate = threading.Event()
    put = guarded._queue._store

    def gated(batch: object) -> None:
        gate.wait(20)
        put(batch)  # type: ignore[arg-type]

    guarded._queue._store = gated  # type: ignore[assignment]
    assert guarded.store_later(keys[:6], rows[:6]) == 6
    assert guarded.store_later(keys[6:], rows[6:]) == 4
    assert guarded.store_later(keys[10:], rows[10:]) == 0
    assert totals(guarded, Stat.SHED_QUEUE_BLOCKS) == (6 + 6,)
    into = zeros(1)
    assert guarded.load(keys[:1], into).prefix == 0, "loads go past a queue that is full"
    gate.set()
    assert guarded.flush(20)
    assert guarded.lookup(keys).hit_blocks == 10


def test_a_block_larger_than_the_queue_is_stored_when_it_is_alone(
    served: Served, guard: Open
) -> None:
    guarded = up(guard(queue_bytes=BLOCK_BYTES // 2))
    stored_keys = guarded.keys(range(BLOCK_TOKENS))
    assert guarded.store_later(stored_keys, rows_of(1)) == 1
    assert guarded.flush(20)
    assert guarded.lookup(stored_keys).hit_blocks == 1


def test_a_refused_namespace_turns_the_connector_off_and_says_what_differs(
    served: Served, guard: Open, caplog: pytest.LogCaptureFixture
) -> None:
    keys, _ = stored(up(guard()))
    other = guard(spec_with(dtype="float8_e4m3"))
    assert not other.connected(20)
    assert other.state is State.OFF
    assert other.lookup(keys).hit_blocks == 0
    assert other.store(keys, rows_of(4)) == (False,) * 4
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "dtype: bfloat16 -> float8_e4m3" in line
    assert up(guard(spec_with(dtype="float8_e4m3"), supersede=True)).lookup(keys).hit_blocks == 0


def test_full_tiers_are_no_fault_of_the_daemon(folder: Path, guard: Open) -> None:
    with Served(folder, dram="16MiB", disk="0B"):
        guarded = up(guard())
        kept = guarded.keys(range(1600 * BLOCK_TOKENS))
        guarded.store(kept, rows_of(1600))
        found = guarded.lookup(kept).hit_blocks
        held = guarded.attempt(lambda ns: ns.get_view(kept[:found]), None)
        assert held is not None
        more = guarded.keys(range(7, 7 + 4000 * BLOCK_TOKENS))
        assert not all(guarded.store(more, rows_of(4000)))
        assert totals(guarded, Stat.SHED_SPACE_BLOCKS)[0] > 0
        assert guarded.state is State.UP
        held.release()


def test_a_bug_in_a_call_is_a_miss_told_once(
    served: Served, guard: Open, caplog: pytest.LogCaptureFixture
) -> None:
    guarded = up(guard())
    keys = guarded.keys(range(32))
    for _ in range(3):
        assert guarded.load(keys, [np.zeros(5, np.uint8)] * 2).prefix == 0
        assert guarded.store_later(keys, ["no array"] * 2) == 0  # type: ignore[list-item]
        assert guarded.attempt(lambda _: 1 // 0, 5) == 5
    stored(guarded)
    assert guarded.load(guarded.keys(range(32)), [np.zeros(5, np.uint8)] * 2).prefix == 0
    assert guarded.state is State.UP
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert {type(r.exc_info[1]).__name__ for r in errors} == {
        "InvalidArgument",
        "ZeroDivisionError",
    }
    assert len(errors) == 2


def test_closing_ends_its_threads_and_what_comes_later_is_a_miss(
    served: Served, guard: Open
) -> None:
    guarded = up(guard())
    keys, rows = stored(guarded)
    before = served.stat().sessions
    guarded.close()
    assert served.stat().sessions == before - 1
    assert guarded.lookup(keys).hit_blocks == 0
    assert guarded.store_later(keys, rows) == 0
    assert not guarded.connected(0)
    names = {"kvstored-reach", "kvstored-store"}
    wait_until(lambda: not names & {t.name for t in threading.enumerate()}, 5)
    with pytest.raises(Unavailable):
        guarded._reach._client.session()
