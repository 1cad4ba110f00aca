"""What doctor says of configured GPUs, and where the running daemon could not use them."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstored import config
from kvstored.cli import checks_gpu
from kvstored.cli.checks import Level
from kvstored.client import Client
from kvstored.config import Config
from kvstored.core.types import TierId
from tests.crash.blocks import content_of, spec_of, tokens_of
from tests.crash.served import Served, kvstored, wait_until

GIB = 1 << 30


def configured(devices: str, capacity: str = "8GiB") -> Config:
    environ = {"HOME": "/", "KVSTORED_HBM_DEVICES": devices, "KVSTORED_HBM_CAPACITY": capacity}
    return config.load(environ=environ).config


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2, getDeviceProperties=lambda _: {"totalGlobalMem": 16 * GIB}
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


def test_without_configured_gpus_there_is_nothing_to_say() -> None:
    assert checks_gpu.hbm(configured("off")) == []


@pytest.mark.usefixtures("two_gpus")
def test_pools_that_fit_are_well_and_others_fail_with_a_remedy() -> None:
    assert [each.level for each in checks_gpu.hbm(configured("0,1"))] == [Level.OK] * 2
    (large,) = checks_gpu.hbm(configured("0", "15GiB"))
    assert (large.level, large.remedy) == (Level.FAIL, "lower hbm.capacity")
    (absent,) = checks_gpu.hbm(configured("2"))
    assert absent.level is Level.FAIL
    assert "2 devices" in absent.text


def test_a_gpu_without_cupy_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    (found,) = checks_gpu.hbm(configured("0"))
    assert found.level is Level.FAIL
    assert "cuda12" in found.remedy


def test_a_stand_in_is_a_warning() -> None:
    (found,) = checks_gpu.hbm(configured("host:0"))
    assert found.level is Level.WARN


def test_doctor_and_stat_tell_why_a_running_daemon_does_not_use_its_gpu(tmp_path: Path) -> None:
    with Served(tmp_path, dram="32MiB", disk="0B", settings={"hbm.devices": "0"}) as served:
        wait_until(lambda: any(tier.reason for tier in served.stat().tiers), what="it is off")
        reason = next(tier.reason for tier in served.stat().tiers if tier.reason)
        flags = ("--socket", str(served.socket))
        shown = kvstored("stat", "--address", served.address)
        assert f"hbm is off: {reason[:20]}" in " ".join(shown.stdout.split())
        state = ("--state-dir", str(served.state_dir))
        told = kvstored("doctor", *state, *flags, "--dram", "32MiB", "--disk", "0B")
        assert "its tier hbm is off" in " ".join(told.stdout.split())


def test_prefetch_brings_blocks_to_the_gpu(tmp_path: Path) -> None:
    settings = {"hbm.devices": "host:0", "hbm.capacity": "2MiB"}
    with Served(tmp_path, dram="32MiB", disk="0B", settings=settings) as served:
        wait_until(lambda: any(t.granted_bytes for t in served.stat().tiers if t.name == "hbm"))
        with Client(served.address) as client:
            namespace = client.open_namespace(spec_of(4096))
            keys = namespace.keys(tokens_of([1, 2]))
            namespace.put(keys, [content_of(key, 4096) for key in keys])
            address = ("--address", served.address, "--json")
            words = (namespace.digest.hex(), *[key.hex() for key in keys])
            done = kvstored("prefetch", *words, "--tier", "hbm", "--wait", *address)
            assert json.loads(done.stdout)["blocks_done"] == 2, done.stderr
            assert all(bits >> TierId.HBM & 1 for bits in namespace.locate(keys).tiers)
