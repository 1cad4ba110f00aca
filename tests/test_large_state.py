"""The sizes of real models at their ends: a state checkpoint of 800 MB beside blocks of 4 KiB, through both tiers and a restart."""

import tempfile
from pathlib import Path

import numpy as np

from kvstored.client import Client, GroupKind, GroupSpec, NamespaceSpec
from kvstored.pb import kvstored_pb2 as pb

from .crash.served import Served, wait_until

STATE_BYTES = 838_860_800
"""The window state of Gemma-4-31B."""


def test_a_state_of_800_mb_goes_through_both_tiers_and_a_restart() -> None:
    spec = NamespaceSpec(
        "gemma", "1", "bf16", "nhd", 1, 16,
        (GroupSpec("kv", GroupKind.LINEAR, 4096), GroupSpec("swa", GroupKind.STATE, STATE_BYTES)),
    )  # fmt: skip
    state = np.random.default_rng(8).integers(0, 256, STATE_BYTES, dtype=np.uint8)
    settings = {"limits.checkpoint_share": "0.6"}
    with (
        tempfile.TemporaryDirectory(prefix="kvs") as folder,
        Served(Path(folder), dram="2GiB", disk="2GiB", settings=settings) as served,
        Client(served.address, timeout_s=50) as client,
    ):
        wait_until(lambda: tier(client, 0).granted_bytes == 2 << 30)
        namespace = client.open_namespace(spec)
        keys = namespace.keys(range(4 * 16))
        rows = [[np.full(4096, i, np.uint8), state if i == 3 else None] for i in range(4)]
        assert namespace.put(keys, rows, groups=["kv", "swa"]).committed == 4
        assert namespace.match(keys).checkpoint_tokens == 64
        wait_until(lambda: tier(client, 0).dirty_copies == 0, what="written back")
        served.restart()
        served.recovered()
        block = namespace.get(keys[3:4], groups=["kv", "swa"], timeout_s=50).blocks[0]
        assert block is not None
        assert np.array_equal(block[1], state)


def tier(client: Client, place: int) -> pb.TierStat:
    return client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[place]
