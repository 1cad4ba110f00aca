"""Match with advice, and how the daemon learns how fast engines compute."""

from pathlib import Path

import pytest

from kvstored.core.speed import Line
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from tests.store.world import BLOCK_BYTES, BLOCK_TOKENS
from tests.transport.test_service import Peer, keys_of, raises, serving


def test_advice_comes_where_it_is_asked_for(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(6))
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(8)))
        assert not (await peer.call("Match", match)).HasField("advice")
        match.advise = True
        advice = (await peer.call("Match", match)).advice
        assert list(advice.load_bytes) == [0, 6 * BLOCK_BYTES, 0, 0]
        assert (advice.prefill_source, advice.prefill_s) == ("", 0.0)
        assert (advice.deadline_blocks, advice.deadline_tokens) == (6, 6 * BLOCK_TOKENS)
        match.prefill_tokens_per_s = 1e12
        advice = (await peer.call("Match", match)).advice
        assert (advice.prefill_source, advice.split_blocks) == ("asked", 0)

    serving(tmp_path, test)


def test_a_hit_of_nothing_has_advice_too(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(2)), advise=True)
        match.prefill_tokens_per_s = 1.0
        advice = (await peer.call("Match", match)).advice
        assert (advice.split_blocks, advice.deadline_blocks, advice.total_load_s) == (0, 0, 0.0)

    serving(tmp_path, test)


def test_a_deadline_names_the_prefix_that_can_be_loaded_by_it(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        peer.world.store.speeds._memory._line = Line(1e-3, 1e-3 / BLOCK_BYTES)
        await peer.put(range(6))
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(6)), advise=True)
        match.deadline_ms = 5
        advice = (await peer.call("Match", match)).advice
        assert (advice.deadline_blocks, advice.deadline_tokens) == (3, 3 * BLOCK_TOKENS)

    serving(tmp_path, test)


def test_the_speed_of_engines_is_learned_from_completed_requests(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.put(range(4))
        begin = pb.BeginRequestRequest(
            session=peer.token, namespace=peer.digest, keys=keys_of(range(4))
        )
        begun = await peer.call("BeginRequest", begin)
        complete = pb.CompleteRequestRequest(
            session=peer.token, request_id=begun.request_id, prefill_tokens=1000, prefill_s=2.0
        )
        await peer.call("CompleteRequest", complete)
        match = pb.MatchRequest(namespace=peer.digest, keys=keys_of(range(4)), advise=True)
        advice = (await peer.call("Match", match)).advice
        assert advice.prefill_source == "measured"
        assert advice.prefill_s == pytest.approx(4 * BLOCK_TOKENS / 500)

    serving(tmp_path, test)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_speeds_that_are_none_are_refused(tmp_path: Path, bad: float) -> None:
    async def test(peer: Peer) -> None:
        for field in ("prefill_tokens_per_s", "prefill_flops_per_s"):
            match = pb.MatchRequest(
                namespace=peer.digest, keys=keys_of(range(1)), advise=True, **{field: bad}
            )
            await raises(InvalidArgument, peer.call("Match", match))

    serving(tmp_path, test)
