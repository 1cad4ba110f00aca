"""Schedule over messages: what comes next, of the caller's namespaces only."""

from pathlib import Path

from kvstored.core.types import TierId
from kvstored.pb import kvstored_pb2 as pb
from tests.store.world import BLOCK_BYTES
from tests.transport.test_service import STRANGER, Peer, keys_of, serving


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
