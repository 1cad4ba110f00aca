"""What the policy learned comes back after a restart, whole or not at all."""

import struct
from pathlib import Path

import pytest
import xxhash

from kvstored.core.calls import Limits, TierLimits
from kvstored.core.catalog import Catalog
from kvstored.core.hints import Hint
from kvstored.core.policies.base import Policy
from kvstored.core.types import TierId
from kvstored.sim.lean import LeanModel
from kvstored.store import learned
from tests.sim.test_core import random_kvt1

NOW_S = 1000.0


def fresh(policy: str = "composite") -> Policy:
    tiers = [TierLimits(TierId.DRAM, 100)]
    return Catalog(tiers=tiers, policy=policy, limits=Limits(), epoch=1).books.policy


def taught(tmp_path: Path) -> Policy:
    model = LeanModel(policy="composite", capacity_blocks=30, block_tokens=512)
    for row, request in enumerate(random_kvt1(tmp_path / "trace", 1, requests=200)):
        hint = Hint(output_tokens=100 * row, category="chat" if row % 2 else "agent", priority=1)
        model.request(request.ts_s, request.block_ids, hint)
    return model.policy


def test_another_daemon_goes_on_from_what_was_learned(tmp_path: Path) -> None:
    first, second = taught(tmp_path), fresh()
    dumped = first.dump(NOW_S)
    learned.save(tmp_path, first.name, dumped)
    assert learned.restore(tmp_path, second, NOW_S) == ""
    assert second.dump(NOW_S) == dumped
    assert len(dumped) > 1000


def test_nothing_kept_is_no_fault(tmp_path: Path) -> None:
    assert learned.restore(tmp_path, fresh(), NOW_S) == ""


def test_a_policy_that_learns_nothing_has_nothing_to_keep() -> None:
    assert fresh("lru").dump(NOW_S) == b""


def test_any_damage_is_a_cold_start(tmp_path: Path) -> None:
    learned.save(tmp_path, "composite", taught(tmp_path).dump(NOW_S))
    path = tmp_path / learned.FILE_NAME
    whole = path.read_bytes()
    cold = fresh().dump(NOW_S)
    for at in [*range(64), len(whole) // 2, len(whole) - 1]:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        policy = fresh()
        assert learned.restore(tmp_path, policy, NOW_S), f"{at=}"
        assert policy.dump(NOW_S) == cold
    for size in (0, 10, 40, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert learned.restore(tmp_path, fresh(), NOW_S), f"{size=}"


@pytest.mark.parametrize(
    "dumped",
    [b"", b"\1\0\0\0", struct.pack("<I", 2) + b"{}", struct.pack("<I", 5) + b"[[1]]" + b"\0" * 28],
)
def test_bytes_of_another_shape_under_a_right_checksum_are_refused(
    tmp_path: Path, dumped: bytes
) -> None:
    learned.save(tmp_path, "composite", dumped)
    assert (
        xxhash.xxh3_64_intdigest(dumped).to_bytes(8, "little")
        in (tmp_path / learned.FILE_NAME).read_bytes()
    )
    assert learned.restore(tmp_path, fresh(), NOW_S)


def test_the_state_of_another_policy_is_not_taken(tmp_path: Path) -> None:
    learned.save(tmp_path, "lru", taught(tmp_path).dump(NOW_S))
    assert "lru" in learned.restore(tmp_path, fresh(), NOW_S)
