"""Clients of a real daemon whose GPU is a stand-in: they map its pool, read leased blocks in place, and are told where that cannot be."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import (
    AsyncClient,
    Client,
    InvalidArgument,
    Keys,
    LeaseLost,
    Namespace,
    Unavailable,
    View,
)
from kvstored.client.channel import Session
from kvstored.client.links import GetCall, Leased
from kvstored.core.types import GroupKind, GroupSpec, TierId
from kvstored.pb import kvstored_pb2 as pb
from tests.codec import real
from tests.crash.blocks import content_of, spec_of, tokens_of
from tests.crash.served import ROOT, Served, environment, free_port, wait_until
from tests.tiers.test_coding import FULL_BYTES

BLOCK_BYTES = 64 << 10
HBM = 1 << TierId.HBM


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {"hbm.devices": "host:0,host:1", "hbm.capacity": "2MiB", "policy": "composite"}
    folder = tmp_path_factory.mktemp("gpu")
    with Served(folder, dram="64MiB", disk="64MiB", settings=settings) as served:
        wait_until(lambda: hbm_of(served.stat()).granted_bytes == 4 << 20, what="pools are open")
        yield served


@pytest.fixture
def namespace(served: Served) -> Iterator[Namespace]:
    with Client(served.address) as client:
        yield client.open_namespace(spec_of(BLOCK_BYTES))


def is_reached(address: str) -> bool:
    try:
        with Client(address) as client:
            return bool(client.session())
    except Unavailable:
        return False


def hbm_of(stat: pb.StatResponse) -> pb.TierStat:
    return next(tier for tier in stat.tiers if tier.name == "hbm")


def put(namespace: Namespace, path: list[int]) -> Keys:
    keys = namespace.keys(tokens_of(path))
    namespace.put(keys, [content_of(key, BLOCK_BYTES) for key in keys])
    return keys


def test_blocks_are_read_where_they_lie_on_the_gpu(served: Served, namespace: Namespace) -> None:
    keys = put(namespace, [1, 2, 3])
    with namespace.map_gpu(keys) as view:
        assert view.hits == 3
        for key, block in zip(keys, view.blocks, strict=True):
            assert block is not None
            np.testing.assert_array_equal(block[0], content_of(key, BLOCK_BYTES))
            assert not block[0].flags.writeable
            assert not block[0].flags.owndata
            taken = np.from_dlpack(block[0])  # as another library takes it
            assert taken.ctypes.data == block[0].ctypes.data
        assert hbm_of(served.stat()).leased_bytes == 3 * BLOCK_BYTES
    wait_until(lambda: not hbm_of(served.stat()).leased_bytes, what="the lease is gone")
    assert all(bits & HBM for bits in namespace.locate(keys).tiers)
    assert namespace.match(keys).tier_blocks[TierId.HBM] == 3


def test_what_is_not_there_is_a_miss_and_more_than_fits_is_refused_in_part(
    namespace: Namespace,
) -> None:
    keys = put(namespace, [10])
    absent = namespace.keys(tokens_of([11]))
    with namespace.map_gpu(Keys((*keys, *absent), unchained=True)) as view:
        assert [block is not None for block in view.blocks] == [True, False]
        assert view.miss_reason
    many = put(namespace, list(range(100, 180)))  # 5 MiB into 4
    with namespace.map_gpu(many) as view:
        assert 0 < view.hits < 80
        for key, block in zip(many, view.blocks, strict=True):
            if block is not None:
                np.testing.assert_array_equal(block[0], content_of(key, BLOCK_BYTES))


def test_a_prefetch_brings_blocks_to_the_gpu(served: Served, namespace: Namespace) -> None:
    keys = put(namespace, [20, 21])
    namespace.prefetch(keys, tier="hbm", deadline_s=10)
    wait_until(lambda: all(bits & HBM for bits in namespace.locate(keys).tiers))
    with pytest.raises(InvalidArgument):
        namespace.prefetch(keys, tier="remote")


def test_a_lease_that_ended_voids_what_was_read(namespace: Namespace) -> None:
    keys = put(namespace, [30])
    view = namespace.map_gpu(keys, ttl_s=0.1)
    with Client(namespace._client.address) as other:  # type: ignore[attr-defined]
        wait_until(lambda: not other.call("Stat", pb.StatRequest(), pb.StatResponse).leases)
    with pytest.raises(LeaseLost):
        view.release()


def test_bandwidth_is_left_to_a_caller(served: Served) -> None:
    with Client(served.address) as client:
        request = pb.ReserveBandwidthRequest(
            session=client.session(), bytes_per_s=1 << 30, ttl_ms=1000
        )
        answer = client.call("ReserveBandwidth", request, pb.ReserveBandwidthResponse)
    assert answer.left_bytes_per_s == 0, "this daemon has no bound"


def test_a_pool_that_cannot_be_shared_is_told_and_dram_is_read(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstored.client import gpu

    keys = put(namespace, [40])
    not_shared = pb.GpuPoolResponse(kind=pb.NOT_SHARED)
    original = gpu._pool_of
    monkeypatch.setattr(gpu, "_pool_of", lambda _: original(not_shared))
    with pytest.raises(Unavailable, match="read from dram"):
        namespace.map_gpu(keys)
    with namespace.get_view(keys) as view:
        assert view.hits == 1


def test_without_gpus_the_client_is_told_so(tmp_path: Path) -> None:
    with Served(tmp_path, dram="32MiB", disk="0B") as served, Client(served.address) as client:
        namespace = client.open_namespace(spec_of(BLOCK_BYTES))
        keys = put(namespace, [1])
        with pytest.raises(InvalidArgument, match=r"hbm\.devices"):
            namespace.map_gpu(keys)


def test_a_gpu_without_cupy_or_driver_leaves_the_daemon_serving(tmp_path: Path) -> None:
    """The reason is in stat, log and metric."""
    with Served(tmp_path, dram="32MiB", disk="0B", settings={"hbm.devices": "0"}) as served:
        wait_until(lambda: hbm_of(served.stat()).state == "off", what="the tier is off")
        reason = hbm_of(served.stat()).reason
        assert "cupy" in reason or "gpu" in reason
        assert "the hbm tier is off" in served.tail()
        with Client(served.address) as client:
            namespace = client.open_namespace(spec_of(BLOCK_BYTES))
            keys = put(namespace, [1])
            assert namespace.get(keys).hits == 1
            with pytest.raises(Unavailable, match="read from dram"):
                namespace.map_gpu(keys)


def test_contents_of_the_gpu_are_gone_after_a_restart_and_never_wrong(tmp_path: Path) -> None:
    settings = {"hbm.devices": "host:0", "hbm.capacity": "2MiB"}
    with Served(tmp_path, dram="32MiB", disk="64MiB", settings=settings) as served:
        wait_until(lambda: hbm_of(served.stat()).granted_bytes, what="the pool is open")
        with Client(served.address) as client:
            namespace = client.open_namespace(spec_of(BLOCK_BYTES))
            keys = put(namespace, [1, 2, 3])
            namespace.map_gpu(keys).release()
            epoch = served.kill_daemon().epoch
            served.answered(after_epoch=epoch)
            served.recovered()
            wait_until(lambda: hbm_of(served.stat()).granted_bytes, what="the pool is open again")
            assert not any(bits & HBM for bits in namespace.locate(keys).tiers)
            with namespace.map_gpu(keys) as view:
                assert view.hits == 3
                for key, block in zip(keys, view.blocks, strict=True):
                    assert block is not None
                    np.testing.assert_array_equal(block[0], content_of(key, BLOCK_BYTES))


def test_blocks_that_a_disk_has_packed_are_read_on_the_gpu_without_a_copy_in_dram(
    tmp_path: Path,
) -> None:
    """By a whole daemon: 25 MiB of real KV through 16 MiB of memory."""
    settings = {
        "hbm.devices": "host:0",
        "hbm.capacity": "16MiB",
        "disk.codec": "fast",
        "disk.lossy": "cold=rotated4,shared=int8",
        "policy": "lru",
    }
    kv = GroupSpec("kv", GroupKind.LINEAR, FULL_BYTES, lossy_ok=True)
    spec = replace(spec_of(FULL_BYTES), dtype="bfloat16", block_tokens=256, groups=(kv,))
    with Served(tmp_path, dram="16MiB", disk="64MiB", settings=settings) as served:
        wait_until(lambda: hbm_of(served.stat()).granted_bytes, what="the pool is open")
        with Client(served.address) as client:
            namespace = client.open_namespace(spec)
            keys = Keys(tuple(bytes([i]) * 32 for i in range(100)), unchained=True)
            cold, on_disk = keys[:16], 1 << TierId.NVME
            rows = np.concatenate([real.bits("a"), real.bits("b")] * 2)
            for i, key in enumerate(keys):
                plain = np.ascontiguousarray(np.roll(rows, i, axis=1)).reshape(-1).view(np.uint8)
                namespace.put(Keys((key,), unchained=True), [[plain]])
                if i == 15:  # before others push them out of memory
                    wait_until(lambda: all(b & on_disk for b in namespace.locate(cold).tiers))
            wait_until(lambda: all(b & 0x7F == on_disk for b in namespace.locate(cold).tiers))
            with namespace.map_gpu(cold) as view:
                assert view.hits == 16
                up = namespace.locate(cold).tiers
                assert all(bits & 0x7F == HBM | on_disk for bits in up)
                shown = [np.array(block[0]) for block in view.blocks if block is not None]
            # memory is full of blocks that are being written
            wait_until(lambda: namespace.get(cold).hits == 16)
            for mapped, got in zip(shown, namespace.get(cold).blocks, strict=True):
                assert got is not None
                np.testing.assert_array_equal(mapped, got[0])


COUNT_IMPORTS = """
import sys
import kvstored.daemon, kvstored.cli.main, kvstored.client
from kvstored import config
from kvstored.clock import SystemClock
from kvstored.composition import compose
parts = compose(config.load().config, SystemClock(), {}, 0)
parts.close()
loaded = [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupy_backends", "cuda")]
print(len(loaded), "kvstored.tiers.cuda" in sys.modules)
"""


def test_nothing_of_cuda_is_imported_where_the_tier_is_off(tmp_path: Path) -> None:
    """With a cupy that would be found."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").write_text("raise SystemExit('cupy was imported')")
    environ = {
        **environment(),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
        "KVSTORED_STATE_DIR": str(tmp_path / "state"),
        "KVSTORED_DRAM_CAPACITY": "1MiB",
        "KVSTORED_DISK_CAPACITY": "0B",
    }
    done = subprocess.run(
        [sys.executable, "-c", COUNT_IMPORTS],
        env=environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout.split() == ["0", "False"], done.stderr


def test_a_lease_ends_only_when_the_gpu_is_done_with_its_blocks() -> None:
    order: list[str] = []
    leased = Leased(
        session=Session(b"t" * 16, 1, 10.0),
        lease=7,
        held_until_s=0.0,
        bytes=0,
        blocks=(),
        status=(),
        miss_reason="",
        lossy=b"",
        settle=lambda: order.append("settled"),
    )

    def release(_: Leased) -> bool:
        order.append("released")
        return True

    View(leased, release=release, renew=lambda *_: True).release()
    assert order == ["settled", "released"]


@pytest.mark.parametrize("scheme", ["grpc", "bulk"])
def test_places_on_a_gpu_are_never_streamed_as_if_they_were_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """The front reads segments of the arena: there the same place is another block's."""
    listen = f"127.0.0.1:{free_port()}"
    settings = {"hbm.devices": "host:0", "hbm.capacity": "2MiB"}
    with (
        Served(tmp_path, dram="32MiB", disk="0B", listen=listen, settings=settings) as served,
        Client(served.address) as local,
    ):
        wait_until(lambda: hbm_of(served.stat()).granted_bytes, what="the pool is open")
        keys = put(local.open_namespace(spec_of(BLOCK_BYTES)), [1])
        wait_until(lambda: is_reached(f"{scheme}://{listen}"), what="the front is up")
        with Client(f"{scheme}://{listen}") as remote:
            namespace = remote.open_namespace(spec_of(BLOCK_BYTES))
            assert namespace.get(keys).hits == 1
            original = Namespace._acquire

            def on_gpu(*arguments: object, **named: object) -> GetCall:
                call = original(*arguments, **named)  # type: ignore[arg-type]
                call.request.tier = "hbm"
                return call

            monkeypatch.setattr(Namespace, "_acquire", on_gpu)
            with pytest.raises(InvalidArgument, match="from dram only"):
                namespace.get(keys)
            with pytest.raises(InvalidArgument, match="local channel"):
                namespace.map_gpu(keys)


@pytest.mark.parametrize("stream", [None, 7], ids=["host", "stream"])
def test_layers_are_read_as_they_come(namespace: Namespace, stream: int | None) -> None:
    keys = put(namespace, list(range(200 + 20 * bool(stream), 210 + 20 * bool(stream))))
    with namespace.map_gpu(keys, layers=32) as view:
        assert view.hits == 10
        for layer in range(1, 33):
            view.wait_layers(layer, stream=stream)
            begin, end = (layer - 1) * BLOCK_BYTES // 32, layer * BLOCK_BYTES // 32
            for key, block in zip(keys, view.blocks, strict=True):
                assert block is not None
                np.testing.assert_array_equal(
                    block[0][begin:end], content_of(key, BLOCK_BYTES)[begin:end]
                )
    with pytest.raises(LeaseLost):
        view.wait_layers(1)
    with namespace.map_gpu(keys) as view:
        view.wait_layers(32)
    with pytest.raises(InvalidArgument, match="layers=7"):
        namespace.map_gpu(keys, layers=7)


def test_asynchronous_clients_read_on_the_gpu_too(served: Served) -> None:
    async def main() -> None:
        async with AsyncClient(served.address) as client:
            namespace = await client.open_namespace(spec_of(BLOCK_BYTES))
            keys = namespace.keys(tokens_of([70, 71]))
            await namespace.put(keys, [content_of(key, BLOCK_BYTES) for key in keys])
            async with namespace.map_gpu(keys) as view:
                assert view.hits == 2

    asyncio.run(main())
