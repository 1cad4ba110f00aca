"""Schedule over messages: what comes next, of the caller's namespaces only."""

from pathlib import Path
from typing import Any

import numpy as np

from kvstored.core.feedback import FeedbackLimits
from kvstored.core.prefetched import PrefetchLimits
from kvstored.core.types import TierId
from kvstored.errors import InvalidArgument
from kvstored.model.selection import runs_of
from kvstored.pb import kvstored_pb2 as pb
from tests.store.world import BLOCK_BYTES
from tests.transport.test_service import STRANGER, Peer, keys_of, raises, serving


def test_a_dry_run_shows_and_a_run_does_it(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(4))
        dry = await peer.call("Schedule", pb.ScheduleRequest(dry_run=True))
        assert list(dry.objectives) == ["hit-rate", "transfer", "decode", "footprint"]
        assert [tier.name for tier in dry.tiers] == ["dram", "nvme"]
        (write,) = dry.writes
        assert (write.blocks, write.tier, write.decision) == (4, "nvme", "admit")
        assert write.namespace == peer.digest
        assert (dry.write_bytes, dry.evicted_copies) == (0, 0)
        assert await peer.call("Schedule", pb.ScheduleRequest(dry_run=True)) == dry
        done = await peer.call("Schedule", pb.ScheduleRequest())
        assert done.write_bytes == 4 * BLOCK_BYTES
        await peer.world.settle()
        assert not (await peer.call("Schedule", pb.ScheduleRequest(dry_run=True))).writes

    serving(tmp_path, test)


def test_others_namespaces_are_not_shown(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(4))
        seen = await peer.call("Schedule", pb.ScheduleRequest(dry_run=True), STRANGER)
        assert not seen.writes
        assert len(seen.tiers) == 2

    serving(tmp_path, test)


def test_a_page_in_has_its_signal_deadline_and_predicted_end(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        for i in range(16):
            await peer.put(range(i, i + 1))
            await peer.world.janitor.write_back_once()
            await peer.world.settle()
        begin = pb.BeginRequestRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(1))
        )
        begin.load_deadline_ms = 2000
        begin.for_transfer = True
        await peer.call("BeginRequest", begin)
        plan = await peer.call("Schedule", pb.ScheduleRequest(dry_run=True))
        (page_in,) = plan.page_ins
        assert (page_in.signal, page_in.tier, page_in.blocks) == ("transfer", "nvme", 1)
        assert page_in.deadline_in_s == 2.0
        assert 0 < page_in.ready_in_s < 1.0
        assert plan.running_requests == 1
        await peer.call("Schedule", pb.ScheduleRequest())
        await peer.world.settle()
        located = await peer.call(
            "Locate", pb.LocateRequest(namespace=peer.digest, keys=keys_of(range(1)))
        )
        assert located.tiers[0] >> TierId.DRAM & 1

    serving(tmp_path, test, arena_blocks=8)


# ---- attention and working sets


def bits_of(rows: list[str]) -> bytes:
    """Rows of 0 and 1, oldest step first."""
    table = np.asarray([[int(bit) for bit in row] for row in rows], dtype=np.uint8)
    return np.packbits(table, axis=1, bitorder="little").tobytes()


def test_selections_of_several_steps_are_taken_in_one_report(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(10))
        report = pb.ReportAccessRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(12)), steps=9
        )
        report.selected = bits_of(["110000000100"] * 9)
        told = await peer.call("ReportAccess", report)
        assert (told.taken, told.blocks, told.raised, told.wanted) == (True, 10, 3, 0)
        counts = peer.world.shell.counts
        assert counts["feedback_blocks", "known"] == 10
        assert counts["feedback_blocks", "unknown"] == 2
        assert counts["read_keys_hit", "dram"] == 0, "a selection is no read"

    serving(tmp_path, test)


def test_mass_is_taken_in_place_of_selections(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(3))
        report = pb.ReportAccessRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(3)), mass=[0.9, 0.1, 0]
        )
        assert (await peer.call("ReportAccess", report)).blocks == 3

    serving(tmp_path, test)


def test_tags_are_told_alone_or_with_a_selection_and_explained(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(3))
        report = pb.ReportAccessRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(3)), tags=bytes([0, 5, 8])
        )
        told = await peer.call("ReportAccess", report)
        assert (told.taken, told.blocks) == (True, 3)
        explain = pb.ExplainRequest(namespace=peer.digest, keys=keys_of(range(3)))
        texts = [each.text for each in (await peer.call("Explain", explain)).keys]
        assert [text.partition("hits")[2] for text in texts] == [
            "",
            ", entity, field label",
            ", signature",
        ]
        report.tags, report.steps, report.selected = bytes([0, 0, 0]), 1, b"\7"
        assert (await peer.call("ReportAccess", report)).blocks == 3
        texts = [each.text for each in (await peer.call("Explain", explain)).keys]
        assert not any("entity" in text for text in texts), "0 takes a tag away"

    serving(tmp_path, test)


def test_reports_that_do_not_fit_their_keys_are_refused(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        good = pb.ReportAccessRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(9)), steps=2
        )
        good.selected = bytes(4)
        assert (await peer.call("ReportAccess", good)).taken
        bad: list[dict[str, Any]] = [
            {"steps": 3},
            {"steps": 0},
            {"selected": b"\0"},
            {"group": 1},
            {"mass": [1.0]},
            {"mass": [1.0] * 9},
            {"mass": [float("nan")] * 9, "selected": b""},
            {"mass": [-1.0] * 9, "selected": b""},
            {"keys": pb.Keys(key_bytes=32)},
            {"steps": 257, "selected": bytes(514)},
            {"tags": b"\1" * 8},
            {"tags": b"\x10" * 9},
            {"tags": b"\1" * 9, "steps": 0},
        ]
        for fields in bad:
            request = pb.ReportAccessRequest()
            request.CopyFrom(good)
            for name, value in fields.items():
                request.ClearField(name)  # type: ignore[arg-type]  # names of fields
                request.MergeFrom(pb.ReportAccessRequest(**{name: value}))
            await raises(InvalidArgument, peer.call("ReportAccess", request))

    serving(tmp_path, test)


def test_a_layers_weight_is_its_own(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(2))
        limits = FeedbackLimits(weights={("kv", 1): 0.05, ("kv", -1): 1.0})
        peer.world.catalog.feedback.limits = limits
        raised = []
        for layer in (1, 2):
            report = pb.ReportAccessRequest(
                session=peer.token, namespace=peer.digest, keys=keys_of(range(2)), steps=20
            )
            report.layer, report.selected = layer, b"\3" * 20
            raised.append((await peer.call("ReportAccess", report)).raised)
        assert raised == [0, 2]

    serving(tmp_path, test)


def test_a_predicted_set_comes_up_and_is_judged(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        world = peer.world
        for i in range(16):
            await peer.put(range(i, i + 1))
            await world.janitor.write_back_once()
            await world.settle()
        report = pb.ReportResidentRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(1, 2)), deadline_ms=500
        )
        assert (await peer.call("ReportResident", report)).wanted == 1
        (want,) = world.catalog.page_ins.wants
        assert (want.signal.value, want.deadline_s) == ("resident", world.clock.now_s() + 0.5)
        await world.janitor.page_in_once()
        await world.settle()
        world.clock.advance(0.5)
        await peer.call("Acquire", peer.acquire(keys_of(range(1, 3))))
        await world.janitor.judge_once()
        assert world.shell.counts["resident_blocks", "in-time"] == 1
        assert world.shell.counts["resident_blocks", "late"] == 0
        assert world.shell.counts["resident_reads", "predicted"] == 1
        assert world.shell.counts["resident_reads", "other"] == 1

    serving(tmp_path, test, arena_blocks=8)


def test_reports_are_recorded_where_that_is_asked_for(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        peer.world.store.accesses.record_to(tmp_path / "log")
        await peer.put(range(2))
        report = pb.ReportAccessRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(2)), steps=1
        )
        report.selected = b"\2"
        await peer.call("ReportAccess", report)
        await peer.world.store.accesses.write_log_once()
        (run,) = runs_of((tmp_path / "log").read_text().splitlines())
        assert run.selected.tolist() == [[False, True]]

    serving(tmp_path, test)


# ---- guesses


async def on_disk(peer: Peer, count: int = 16) -> None:
    """Blocks of their own, of which memory holds the last few only."""
    for i in range(count):
        await peer.put(range(i, i + 1))
        await peer.world.janitor.write_back_once()
        await peer.world.settle()
    peer.world.catalog.carriage.ahead.limits = PrefetchLimits(share=0.5)


async def is_in_memory(peer: Peer, number: int) -> bool:
    keys = keys_of(range(number, number + 1))
    located = await peer.call("Locate", pb.LocateRequest(namespace=peer.digest, keys=keys))
    return bool(located.tiers[0] >> TierId.DRAM & 1)


async def turn(peer: Peer, number: int, **fields: Any) -> None:
    """A request that runs on one block, and ends."""
    begin = pb.BeginRequestRequest(
        session=peer.token, namespace=peer.digest, keys=keys_of(range(number, number + 1)), **fields
    )
    begun = await peer.call("BeginRequest", begin)
    complete = pb.CompleteRequestRequest(session=peer.token, request_id=begun.request_id)
    await peer.call("CompleteRequest", complete)


async def page_in(peer: Peer) -> None:
    await peer.world.janitor.page_in_once()
    await peer.world.settle()


def test_the_last_turn_of_a_conversation_comes_up_with_its_next_match(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await on_disk(peer)
        await turn(peer, 0, hint=pb.Hint(session="s"))
        await page_in(peer)
        assert not await is_in_memory(peer, 0), "nobody said that it goes on"
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(40, 41)))
        match.conversation = "another"
        await peer.call("Match", match)
        await page_in(peer)
        assert not await is_in_memory(peer, 0)
        match.conversation = "s"
        await peer.call("Match", match)
        await page_in(peer)
        assert await is_in_memory(peer, 0)
        match.conversation = "x" * 129
        await raises(InvalidArgument, peer.call("Match", match))

    serving(tmp_path, test, arena_blocks=8)


def test_the_last_turn_comes_up_before_the_next_one_where_the_pause_is_known(
    tmp_path: Path,
) -> None:
    async def test(peer: Peer) -> None:
        await on_disk(peer)
        clock = peer.world.clock
        await turn(peer, 0, hint=pb.Hint(session="s"))
        clock.advance(10.0)
        await turn(peer, 0, hint=pb.Hint(session="s"))
        peer.world.catalog.page_ins.wants.clear()
        await page_in(peer)
        assert not await is_in_memory(peer, 0)
        clock.advance(8.1)
        await page_in(peer)
        assert await is_in_memory(peer, 0)

    serving(tmp_path, test, arena_blocks=8)


def test_what_a_batch_runs_on_comes_up_for_its_next_request(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await on_disk(peer)
        await turn(peer, 0, batch=b"b")
        await turn(peer, 1, batch=b"another")
        await page_in(peer)
        assert not await is_in_memory(peer, 0)
        await turn(peer, 1, batch=b"b")
        await page_in(peer)
        assert await is_in_memory(peer, 0)
        assert peer.world.shell.counts["page_in_blocks", "sibling:taken"] == 1

    serving(tmp_path, test, arena_blocks=8)


def test_what_became_of_guesses_is_counted(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await on_disk(peer)
        world = peer.world
        for number in (0, 1):
            await turn(peer, number, hint=pb.Hint(session=str(number)))
            match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(40, 41)))
            match.conversation = str(number)
            await peer.call("Match", match)
        await page_in(peer)
        assert await is_in_memory(peer, 0)
        assert await is_in_memory(peer, 1), "the second did not push the first out"
        await peer.call("Acquire", peer.acquire(keys_of(range(1))))
        world.clock.advance(20.0)
        await world.janitor.settle_once()
        counts = world.shell.counts
        assert counts["prefetch_outcomes", "session:used"] == 1
        assert counts["prefetch_outcomes", "session:wasted"] == 1
        assert counts["prefetch_wasted_bytes", ""] == 8192

    serving(tmp_path, test, arena_blocks=8)
