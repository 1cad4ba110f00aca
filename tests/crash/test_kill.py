"""A real daemon under load, killed at random moments: loss is legal where it is promised, a wrong byte never is.

Seeds are fixed; KVSTORED_TEST_SEED (a number) tries others.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.client import Client, Keys, Namespace
from kvstored.core.keys import fingerprint
from kvstored.core.namespace import seed as seed_of
from kvstored.core.types import TierId
from kvstored.pb import kvstored_pb2 as pb
from tests.crash.blocks import SIZES, content_of, is_right, spec_of, tokens_of
from tests.crash.journal import Clients, Journal
from tests.crash.served import Served, wait_until

SEED = int(os.environ.get("KVSTORED_TEST_SEED", "0"))
DRAM, NVME = 1 << TierId.DRAM, 1 << TierId.NVME
BATCH = 1024
BUDGETS = {4 << 10: 2 << 20, 64 << 10: 8 << 20, 1 << 20: 12 << 20, 4 << 20: 8 << 20}
"""New bytes of a client in a round: three rounds stay below the capacity of DRAM, so that nothing is evicted."""
DRAM_WARM_SHARE = 0.99
ROUNDS = [
    ("daemon", "daemon", "restart"),
    ("daemon", "both", "daemon"),
    ("daemon", "terminate", "daemon"),
    ("daemon", "daemon", "both"),
    ("both", "restart", "daemon"),
    ("daemon", "both", "terminate"),
    ("restart", "daemon"),
]
"""Twenty in all; each row is one state directory's life."""

GPU_ROUNDS = [("daemon", "both", "restart"), ("terminate", "daemon")]
"""With a stand-in for a GPU as the fastest tier."""

CLIENTS = ("running", "stopped", "dead")
"""At the kill: at work, stopped in the middle of their writes, or gone, so that the tree before is the tree after."""
DRAIN_S = 30.0

Located = dict[int, dict[bytes, int]]
"""Tier bits by block size and key."""


class Life:
    """One state directory and the journal of everything that was ever told about it."""

    def __init__(self, served: Served, rng: random.Random) -> None:
        self.served = served
        self.rng = rng
        self.journal = Journal()
        self.clients = Clients(self.journal)

    def under_load(self) -> None:
        for size_bytes, budget_bytes in BUDGETS.items():
            seed = self.rng.randrange(1 << 30)
            self.clients.start(self.served.address, size_bytes, seed, budget_bytes)
        begun = self.journal.blocks
        deadline_s = time.monotonic() + 20
        while self.journal.blocks < begun + 20 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(self.rng.uniform(0.0, 0.8))

    def located(self) -> Located:
        with Client(self.served.address) as client:
            return {
                size_bytes: dict(_located(client.open_namespace(spec_of(size_bytes)), keys))
                for size_bytes, keys in ((s, list(k)) for s, k in list(self.journal.stored.items()))
            }

    def check_bytes(self) -> Located:
        """Read everything that was ever acknowledged: right or a miss. Bits 0 where it was missed."""
        hits: Located = {}
        with Client(self.served.address) as client:
            for size_bytes, keys in list(self.journal.stored.items()):
                namespace = client.open_namespace(spec_of(size_bytes))
                hits[size_bytes] = dict(_read(namespace, list(keys), size_bytes))
        assert not self.journal.wrong
        return hits

    def read_on_gpu(self) -> None:
        """Some of what was acknowledged, brought up and read in place: right or a miss. After a restart nothing is there at first."""
        read = 0
        wait_until(
            lambda: any(t.granted_bytes for t in self.served.stat().tiers if t.name == "hbm")
        )
        with Client(self.served.address) as client:
            for size_bytes, stored in list(self.journal.stored.items()):
                namespace = client.open_namespace(spec_of(size_bytes))
                chosen = self.rng.sample(sorted(stored), min(4, len(stored)))
                with namespace.map_gpu(Keys(tuple(chosen), unchained=True)) as view:
                    for key, block in zip(chosen, view.blocks, strict=True):
                        if block is not None:
                            assert is_right(key, block[0])
                            read += 1
        assert read, "nothing was read on the GPU"

    def check_new_traffic(self) -> None:
        with Client(self.served.address) as client:
            for size_bytes in SIZES:
                namespace = client.open_namespace(spec_of(size_bytes))
                keys = namespace.keys(tokens_of([self.rng.randrange(1 << 31) for _ in range(3)]))
                rows = [content_of(key, size_bytes) for key in keys]
                assert namespace.put(keys, rows).committed == 3
                got = namespace.get(keys)
                assert got.hits == 3
                for key, block in zip(keys, got.blocks, strict=True):
                    assert block is not None
                    assert is_right(key, block[0])

    def check_places_in_tree(self) -> None:
        """Every node begins where the paths that were put say: at its depth, below its parent.

        A block may have come back without its parent, whose record was not on disk yet. That one stands in: it is a root without
        bytes, and depths below it count from it.
        """
        with Client(self.served.address) as client:
            for size_bytes, depths in list(self.journal.depths.items()):
                namespace = client.open_namespace(spec_of(size_bytes))
                names = {_name(namespace, key): key for key in list(depths)}
                tiers = dict(_located(namespace, list(depths)))
                nodes = tree_of(client, namespace)
                for node in nodes.values():
                    key = names.get(node.head_fingerprint)
                    if key is None or not depths[key]:
                        continue
                    if not node.parent:
                        assert not tiers[key], "a block lost its parent"
                    top = names.get(_root_of(nodes, node).head_fingerprint, key)
                    assert node.depth_blocks == depths[key] - depths[top], "at another depth"


def _root_of(nodes: dict[int, pb.TreeNode], node: pb.TreeNode) -> pb.TreeNode:
    while node.parent:
        node = nodes[node.parent]
    return node


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    seed = f"{SEED}:{request.node.name}"
    sys.stdout.write(f"seed {seed}\n")
    return random.Random(seed)


@pytest.mark.parametrize("rounds", ROUNDS, ids="-".join)
def test_a_killed_daemon_is_warm_again_and_never_serves_a_wrong_byte(
    tmp_path: Path, rng: random.Random, rounds: tuple[str, ...]
) -> None:
    _live(tmp_path, rng, rounds, {})


@pytest.mark.parametrize("rounds", GPU_ROUNDS, ids="-".join)
def test_the_same_with_a_gpu_whose_contents_are_lost(
    tmp_path: Path, rng: random.Random, rounds: tuple[str, ...]
) -> None:
    _live(tmp_path, rng, rounds, {"hbm.devices": "host:0", "hbm.capacity": "24MiB"})


def _live(tmp_path: Path, rng: random.Random, rounds: tuple[str, ...], gpu: dict[str, str]) -> None:
    settings = {"limits.quarantine": "1s", "disk.admit_hits": "0", **gpu}
    with Served(tmp_path, dram="384MiB", settings=settings) as served:
        life = Life(served, rng)
        for number, kind in enumerate(rounds):
            life.under_load()
            clients = rng.choice(CLIENTS)
            if gpu:
                life.read_on_gpu()
            _round(life, kind, clients)
            if gpu:
                life.read_on_gpu()
            life.check_places_in_tree()
            life.check_bytes()
            life.check_new_traffic()
            blocks = life.journal.blocks
            sys.stdout.write(f"round {number}: {kind}, clients {clients}, blocks {blocks}\n")


def _round(life: Life, kind: str, clients: str) -> None:
    """Kill as `kind` says, come back, and compare with what was there before."""
    served = life.served
    if clients == "stopped":
        life.clients.freeze()
        time.sleep(0.1)  # messages that are on their way arrive
    elif clients == "dead":
        life.clients.kill()
        wait_until(lambda: not served.stat().sessions > 1, what="sessions of dead clients end")
    before, tree = life.located(), _trees(life)
    epoch = served.stat().epoch
    _end(served, kind)
    served.answered(after_epoch=epoch)
    if clients == "running" and life.rng.random() < 0.5:
        time.sleep(0.2)
        life.clients.end()  # they went on over the restart
    else:
        life.clients.kill()
    served.recovered()
    is_dram_kept = kind in ("daemon", "restart")
    after = life.located()
    if is_dram_kept:
        _check_warm(before, after, DRAM, DRAM_WARM_SHARE)
    _check_warm(before, after, NVME, 1.0)
    if kind == "terminate":  # what was dirty was flushed
        _check_warm(before, after, NVME, 1.0, of=DRAM | NVME)
    if is_dram_kept and clients == "dead":
        assert _trees(life) == tree


def _end(served: Served, kind: str) -> None:
    if kind == "daemon":
        served.kill_daemon()
    elif kind == "both":
        served.kill_both()
        served.start()
    elif kind == "restart":
        served.restart()
    else:
        begun_s = time.monotonic()
        assert served.terminate() == 0
        assert time.monotonic() - begun_s < DRAIN_S + 10
        served.start()


def _check_warm(before: Located, after: Located, tier: int, share: float, of: int = 0) -> None:
    """Of what lay in `tier` before (or in `of`) this share does again."""
    there = [
        (size_bytes, key)
        for size_bytes, found in before.items()
        for key, bits in found.items()
        if bits & (of or tier)
    ]
    lost = [
        (size_bytes, key.hex()) for size_bytes, key in there if not after[size_bytes][key] & tier
    ]
    assert len(lost) <= len(there) * (1 - share), (len(lost), len(there), lost[:5])


def _trees(life: Life) -> dict[int, object]:
    """What the trees look like without what may lag: nodes by their heads, with depths, lengths and parents."""
    trees: dict[int, object] = {}
    with Client(life.served.address) as client:
        for size_bytes in list(life.journal.stored):
            nodes = tree_of(client, client.open_namespace(spec_of(size_bytes)))
            trees[size_bytes] = {
                node.head_fingerprint.hex(): (
                    node.depth_blocks,
                    node.blocks,
                    node.children,
                    nodes[node.parent].head_fingerprint.hex() if node.parent else "",
                )
                for node in nodes.values()
            }
    return trees


def tree_of(client: Client, namespace: Namespace) -> dict[int, pb.TreeNode]:
    answer = client.call("Tree", pb.TreeRequest(namespace=namespace.digest), pb.TreeResponse)
    assert not answer.cut
    return {node.id: node for node in answer.nodes}


def _name(namespace: Namespace, key: bytes) -> bytes:
    low, high = fingerprint(key, seed_of(namespace.digest))
    return low.to_bytes(8, "little") + high.to_bytes(8, "little")


def _located(namespace: Namespace, keys: list[bytes]) -> Iterator[tuple[bytes, int]]:
    for begin in range(0, len(keys), BATCH):
        some = keys[begin : begin + BATCH]
        tiers = namespace.locate(Keys.opaque(some, unchained=True)).tiers
        yield from zip(some, tiers, strict=True)


def _read(namespace: Namespace, keys: list[bytes], size_bytes: int) -> Iterator[tuple[bytes, int]]:
    step = max(1, min(BATCH, (32 << 20) // size_bytes))
    for begin in range(0, len(keys), step):
        some = keys[begin : begin + step]
        got = namespace.get(Keys.opaque(some, unchained=True))
        assert not got.corrupt
        for key, block in zip(some, got.blocks, strict=True):
            if block is not None:
                assert is_right(key, block[0]), (size_bytes, key.hex())
            yield key, block is not None
