"""A real daemon with a real GPU: clients map its pool by CUDA IPC and read leased blocks in place."""

from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Client
from kvstored.core.types import TierId
from tests.crash.blocks import content_of, spec_of, tokens_of
from tests.crash.served import Served, wait_until

pytestmark = pytest.mark.gpu
BLOCK_BYTES = 1 << 20


def test_blocks_are_read_on_the_gpu_by_another_process(tmp_path: Path) -> None:
    import cupy

    settings = {"hbm.devices": "0", "hbm.capacity": "64MiB"}
    with Served(tmp_path, dram="256MiB", disk="0B", settings=settings) as served:
        wait_until(lambda: any(t.granted_bytes for t in served.stat().tiers if t.name == "hbm"))
        with Client(served.address) as client:
            namespace = client.open_namespace(spec_of(BLOCK_BYTES))
            keys = namespace.keys(tokens_of(range(32)))
            namespace.put(keys, [content_of(key, BLOCK_BYTES) for key in keys])
            with namespace.map_gpu(keys) as view:
                assert view.hits == 32
                for key, block in zip(keys, view.blocks, strict=True):
                    assert block is not None
                    assert isinstance(block[0], cupy.ndarray)
                    taken = cupy.from_dlpack(block[0])
                    assert taken.data.ptr == block[0].data.ptr
                    expected = content_of(key, BLOCK_BYTES)
                    np.testing.assert_array_equal(cupy.asnumpy(taken), expected)
            assert all(bits >> TierId.HBM & 1 for bits in namespace.locate(keys).tiers)


def test_a_stream_waits_for_layers_that_another_process_copies(tmp_path: Path) -> None:
    import cupy

    settings = {"hbm.devices": "0", "hbm.capacity": "256MiB"}
    with Served(tmp_path, dram="512MiB", disk="0B", settings=settings) as served:
        wait_until(lambda: any(t.granted_bytes for t in served.stat().tiers if t.name == "hbm"))
        with Client(served.address) as client:
            namespace = client.open_namespace(spec_of(BLOCK_BYTES))
            keys = namespace.keys(tokens_of(range(128)))
            namespace.put(keys, [content_of(key, BLOCK_BYTES) for key in keys])
            stream = cupy.cuda.Stream(non_blocking=True)
            with namespace.map_gpu(keys, layers=32) as view:
                assert view.hits == 128
                taken = []
                for layer in range(32):
                    view.wait_layers(layer + 1, stream=stream.ptr)
                    begin, end = layer * BLOCK_BYTES // 32, (layer + 1) * BLOCK_BYTES // 32
                    with stream:
                        parts = [block[0][begin:end] for block in view.blocks if block is not None]
                        taken.append(cupy.concatenate(parts).reshape(128, -1))
                stream.synchronize()
                found = cupy.asnumpy(cupy.concatenate(taken, axis=1))
            for key, row in zip(keys, found, strict=True):
                np.testing.assert_array_equal(row, content_of(key, BLOCK_BYTES))
