"""Only what a future hit can consume is stored: which window and state pieces a reservation grants, by checkpoint policy.

Reservations once granted every window and state piece of every block, whatever the policy: blobs that no hit could resume from took
the budget of those that one could.
"""

from pathlib import Path

import numpy as np
import pytest

from kvstored.core.calls import FillStatus
from kvstored.model.presets import Deployment, preset
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.namespaces import message_of
from kvstored.wire.packing import pack_u64
from tests.transport.test_service import Peer, keys_of, serving

TOKENS = 128
EVERY = (0, 1, 2, 3, 4)
KEYS = keys_of(range(len(EVERY)))
POLICIES = {
    "full": (pb.FULL, EVERY),
    "periodic": (pb.PERIODIC, (1, 3)),
    "boundary": (pb.BOUNDARY, (4,)),
    "none": (pb.NONE, ()),
}


def flash(policy: "pb.CheckpointPolicy.ValueType") -> pb.Namespace:
    """The groups of DeepSeek-V4-Flash, small, and a paged window of two blocks behind a boundary."""
    message = message_of(preset("deepseek-v4-flash", Deployment("1", block_tokens=TOKENS)))
    message.checkpoint_policy = policy
    message.checkpoint_period_tokens = 2 * TOKENS if policy == pb.PERIODIC else 0
    for group in message.groups:
        group.bytes_per_block = 64
    message.groups.add(
        name="paged", kind=pb.WINDOW, bytes_per_block=64, window_tokens=TOKENS + 2, per_block=True
    )
    return message


NAMES = ("csa", "indexer", "hca", "swa", "csa_state", "hca_state", "paged")
ALL = (1 << len(NAMES)) - 1


def granted(reserved: pb.ReserveResponse, name: str) -> list[int]:
    """Keys of which the piece of this group has a place."""
    counts = np.frombuffer(reserved.extent_counts, dtype=np.uint8).reshape(-1, len(NAMES))
    return np.flatnonzero(counts[:, NAMES.index(name)]).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", ["left out", "given"])
def test_blobs_are_granted_at_checkpoint_boundaries_only(
    tmp_path: Path, policy: str, sizes: str
) -> None:
    number, boundaries = POLICIES[policy]

    async def test(peer: Peer) -> None:
        await peer.begin(flash(number))
        given = b""
        if sizes == "given":
            table = np.full((len(EVERY), len(NAMES)), 64)
            table[:, NAMES.index("hca_state")] = 0  # no chunk is open at the end of a full block
            given = pack_u64(table.reshape(-1))
        request = peer.reserve(KEYS, groups=ALL, sizes=given, ends_path=True)
        reserved = await peer.call("Reserve", request)
        assert reserved.status == bytes([FillStatus.GRANTED] * len(EVERY))
        for name in ("csa", "indexer", "hca"):
            assert granted(reserved, name) == list(EVERY)
        assert granted(reserved, "hca_state") == []
        assert granted(reserved, "swa") == granted(reserved, "csa_state") == list(boundaries)
        window = {block for end in boundaries for block in (end - 1, end) if block >= 0}
        if policy == "periodic":
            window.add(4)  # the next boundary, behind block 5, reaches back to it
        assert granted(reserved, "paged") == sorted(window)
        abort = pb.AbortRequest(session=peer.token, fills=reserved.fills)
        await peer.call("Abort", abort)

    serving(tmp_path, test)


def test_a_put_that_goes_on_has_no_boundary(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.begin(flash(pb.BOUNDARY))
        reserved = await peer.call("Reserve", peer.reserve(KEYS, groups=ALL))
        assert granted(reserved, "csa") == list(EVERY)
        assert granted(reserved, "swa") == granted(reserved, "paged") == []
        await peer.call("Abort", pb.AbortRequest(session=peer.token, fills=reserved.fills))

    serving(tmp_path, test)


def test_a_key_of_which_nothing_is_left_needs_no_fill(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.begin(flash(pb.NONE))
        mask = 1 << NAMES.index("csa_state")
        reserved = await peer.call("Reserve", peer.reserve(KEYS, groups=mask, ends_path=True))
        assert reserved.status == bytes([FillStatus.PRESENT] * len(EVERY))

    serving(tmp_path, test)


def test_periods_go_on_behind_a_parent_and_are_not_guessed_behind_a_lost_one(
    tmp_path: Path,
) -> None:
    """With the wrong phase a daemon that lost the head of a path would leave out every checkpoint that the engine has."""

    async def test(peer: Peer) -> None:
        await peer.begin(flash(pb.PERIODIC))
        first = await peer.call("Reserve", peer.reserve(keys_of(range(3)), groups=ALL))
        behind = keys_of(range(3, 6), parent=(2).to_bytes(32, "big"))
        reserved = await peer.call("Reserve", peer.reserve(behind, groups=ALL))
        assert granted(reserved, "swa") == [0, 2], "blocks 3 and 5 of the path"
        lost = keys_of(range(10, 13), parent=(9).to_bytes(32, "big"))
        unknown = await peer.call("Reserve", peer.reserve(lost, groups=ALL))
        assert granted(unknown, "swa") == [0, 1, 2]
        more = keys_of(range(13, 16), parent=(12).to_bytes(32, "big"))
        still = await peer.call("Reserve", peer.reserve(more, groups=ALL))
        assert granted(still, "swa") == [0, 1, 2], "its head has no copies: the depth is not known"
        for each in (first, reserved, unknown, still):
            await peer.call("Abort", pb.AbortRequest(session=peer.token, fills=each.fills))

    serving(tmp_path, test)


def test_keys_that_are_no_path_end_each(tmp_path: Path) -> None:
    async def test(peer: Peer) -> None:
        await peer.begin(flash(pb.BOUNDARY))
        loose = keys_of(range(3), unchained=True)
        reserved = await peer.call("Reserve", peer.reserve(loose, groups=ALL, ends_path=True))
        assert granted(reserved, "csa_state") == [0, 1, 2]
        await peer.call("Abort", pb.AbortRequest(session=peer.token, fills=reserved.fills))

    serving(tmp_path, test)
