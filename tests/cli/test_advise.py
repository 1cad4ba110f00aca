"""`advise` says what more space would have brought: a daemon of 48 MiB in all is asked twice for 70 MiB."""

import itertools
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Served, done, run, told

MIB = 1 << 20
BLOCKS, PUTS = 5, 14
_numbers = itertools.count()


def put(name: str) -> None:
    """What finds no room just now, since memory is being written to disk, is asked for and not stored: it is no matter here."""
    tokens = ",".join(str(number) for number in range(4 * BLOCKS))
    size = ("--block-bytes", "1MiB", "--block-tokens", "4")
    run("put", name, "--tokens", tokens, *size, input=os.urandom(BLOCKS * MIB))


@pytest.fixture(scope="module")
def own_daemon() -> Iterator[Served]:
    """Its disk is filled: other tests want theirs to be written."""
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        state_dir = Path(folder) / "state"
        state_dir.mkdir(mode=0o700)
        served = Served(state_dir)
        served.start()
        yield served
        served.stop()


@pytest.fixture
def advice(own_daemon: Served, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of the daemon once it has taken in what was asked for."""
    for setting, value in own_daemon.environment.items():
        monkeypatch.setenv(setting, value)
    names = [f"advised-{next(_numbers)}@1" for _ in range(PUTS)]
    for name in (*names, *names):  # some are on disk or in memory still
        put(name)
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        found: dict[str, Any] = told("advise", "--exaflop-price", "1000000")
        if found["tiers"][-1]["hit_blocks_per_hour"] > 0:
            return found
        time.sleep(0.2)
    pytest.fail(f"nothing was learned: {found}")


def test_a_larger_disk_would_have_hit_what_was_put_twice(advice: dict[str, Any]) -> None:
    assert advice["asked_blocks"] > 48
    assert advice["sampled_share"] == 1.0
    dram, nvme = advice["tiers"]
    assert (dram["tier"], nvme["tier"]) == ("dram", "nvme")
    again = nvme["hit_blocks_per_hour"] * advice["span_s"] / 3600
    assert 0 < again <= advice["asked_blocks"] / 2
    # 10 GiB of memory outgrow the disk: they would hit it too
    assert dram["hit_blocks_per_hour"] == pytest.approx(nvme["hit_blocks_per_hour"])


def test_money_is_flops_times_price(advice: dict[str, Any]) -> None:
    for tier in advice["tiers"]:
        month = tier["saved_flops_per_hour"] * 730 / 1e18 * 1_000_000
        assert tier["saved_per_month"] == pytest.approx(month)
    assert advice["tiers"][-1]["saved_per_month"] > 0


def test_without_a_price_there_is_no_money(advice: dict[str, Any]) -> None:
    found = told("advise", "--more", "1MiB")
    assert [tier["saved_per_month"] for tier in found["tiers"]] == [None, None]
    assert found["more_bytes"] == MIB
    assert "saved a month" not in done("advise").stdout
    assert "saved a month" in done("advise", "--exaflop-price", "2").stdout
