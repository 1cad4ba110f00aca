"""LMCache's multiprocess server over ZMQ, in the mode in which the engine copies: prepare answers with slots of its shared memory, the
client copies, commit follows. A get is lookup, wait, prepare, copy, commit and the session's end, as its own connector does it.

A block is a chunk of 16 tokens, a batch one sequence: so batches are got in the order in which they were put. It forgets nothing by key:
the least recently used is evicted.
"""

import importlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.adapters.base import Address, Bytes, Environment, Need, Store
from bench.peers.environment import python_environment
from bench.peers.processes import accepts, free_port, running

CHUNK_TOKENS = 16
MODEL = "bench"
WAIT_S = 10.0
SPARE = 2
"""Its evictor works in the background, and a put without room fails: `ROOM_S` long it is tried again."""
ROOM_S, PAUSE_S = 3.0, 0.005
TORCH = ("torch==2.13.0",)
NEEDS = (
    *("numpy<=2.2.6", "aiofile", "aiofiles", "blake3", "aiohttp", "awscrt", "cryptography"),
    *("fastapi", "httpx", "huggingface_hub>=1.5.0", "msgspec", "numba", "nvtx"),
    *("opentelemetry-api<=1.40", "opentelemetry-sdk", "opentelemetry-exporter-otlp"),
    *("opentelemetry-exporter-prometheus<=0.61b0", "prometheus_client<=0.24.1", "psutil"),
    *("py-cpuinfo", "pytest", "pyyaml", "pyzmq>=25", "grpcio>=1.78"),
    *("grpcio-observability==1.78.0", "protobuf<7", "redis", "safetensors", "setuptools<81"),
    *("sortedcontainers", "transformers>=5.4", "uvicorn", "httptools", "cachetools"),
)
"""Its own requirements without those for CUDA, which the server does without."""


class Server:
    def __init__(self, address: Address) -> None:
        self.address = address

    def chill(self) -> None:
        raise NotImplementedError("nothing is on disk")


def environment(way: str) -> Environment:
    return python_environment(
        "lmcache",
        [TORCH, NEEDS, ("--no-deps", "lmcache==0.5.6")],
        needs=("numpy<=2.2.6", "xxhash>=3.5"),
    )


@contextmanager
def serve(environment: Environment, folder: Path, need: Need) -> Iterator[Server]:
    port, http, metrics = free_port(), free_port(), free_port()
    name = f"kvstored_bench_{os.getpid()}_{port}"
    command = [environment.program("lmcache"), "server", "--transport", "zmq"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--http-host", "127.0.0.1"]
    command += ["--http-port", str(http), "--prometheus-port", str(metrics)]
    size_gib = SPARE * need.capacity_bytes / (1 << 30)
    command += ["--l1-size-gb", f"{size_gib:.3f}", "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--eviction-trigger-watermark", "0.6"]
    command += ["--supported-transfer-mode", "engine_driven"]
    command += ["--shm-name", name, "--chunk-size", str(CHUNK_TOKENS)]
    with running(
        command,
        folder,
        is_ready=lambda: accepts(port),
        variables=environment.variables,
        wait_s=120.0,
        shared=[f"*{name}*"],
    ):
        yield Server({"url": f"tcp://127.0.0.1:{port}", "block_bytes": str(need.block_bytes)})


def connect(way: str, address: Address, index: int) -> "LMCache":
    return LMCache(address["url"], int(address["block_bytes"]), 1000 + index)


class LMCache(Store):
    # Any: its packages are in the peer's environment only
    def __init__(self, url: str, block_bytes: int, instance: int) -> None:
        multiprocess = "lmcache.v1.multiprocess"
        self._key_type: Any = importlib.import_module(
            f"{multiprocess}.custom_types"
        ).IPCCacheServerKey
        self._torch: Any = importlib.import_module("torch")
        self._zmq: Any = importlib.import_module("zmq").Context()
        factory: Any = importlib.import_module(f"{multiprocess}.transport.factory")
        self._client = factory.RequestClientFactory.create(url, context=self._zmq)
        self._instance = instance
        self._requests = 0
        self._context = self._registered(block_bytes)

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        key = self._key(keys, worker=0)
        slots, order = self._slots(key, len(keys))
        for slot, at in zip(slots, order, strict=True):
            np.copyto(self._bytes_of(slot), buffers[at])
        if not self._context.commit_store(key, self._instance, slots):
            raise KeyError("not stored: commit failed")

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        key = self._key(keys, worker=None)
        self._client.lookup(key, 1).result(timeout=WAIT_S)
        found = self._client.wait_prefetch_status(key.request_id, WAIT_S).result(timeout=WAIT_S)
        if found != len(keys):
            raise KeyError(f"missed: found={found} of {len(keys)}")
        mine = self._key(keys, worker=0, request=key.request_id)
        slots = self._context.prepare_retrieve(mine, self._instance)
        if slots is None or len(slots) != len(keys):
            raise KeyError("missed: no slots")
        for slot, buffer in zip(slots, buffers, strict=True):
            np.copyto(buffer, self._bytes_of(slot))
        if not self._context.commit_retrieve(mine, self._instance):
            raise KeyError("missed: commit failed")
        self._client.end_session(key.request_id).result(timeout=WAIT_S)

    def clear(self, keys: Sequence[bytes]) -> None:
        """It has no such call for some keys: the least recently used are evicted."""

    def close(self) -> None:
        self._client.unregister_kv_cache_engine_driven_context(self._instance).result(
            timeout=WAIT_S
        )
        self._context.close()
        self._client.close()
        self._zmq.term()

    def _slots(self, key: Any, count: int) -> tuple[list[Any], list[int]]:
        until = time.monotonic() + ROOM_S
        while time.monotonic() < until:
            prepared = self._context.prepare_store(key, self._instance)
            if prepared is not None and len(prepared[0]) == count:
                slots, order = prepared
                return slots, order
            time.sleep(PAUSE_S)
        raise KeyError("not stored: no slots")

    def _registered(self, block_bytes: int) -> Any:
        """One layer of K and V in float16 with as many heads' dimensions as make a chunk of this size."""
        types: Any = importlib.import_module("lmcache.v1.multiprocess.custom_types")
        transfer: Any = importlib.import_module("lmcache.v1.multiprocess.transfer_context")
        layouts: Any = importlib.import_module("lmcache.v1.distributed.api")
        hidden = block_bytes // (2 * CHUNK_TOKENS * 2)
        shape = self._torch.Size([2, 1, CHUNK_TOKENS, hidden])
        payload = types.RegisterEngineDrivenContextPayload(
            instance_id=self._instance,
            model_name=MODEL,
            world_size=1,
            block_size=CHUNK_TOKENS,
            num_layers=1,
            hidden_dim_size=hidden,
            dtype_str="float16",
            use_mla=False,
            num_physical_slots=CHUNK_TOKENS,
        )
        registered = self._client.register_kv_cache_engine_driven_context(payload)
        answer = registered.result(timeout=WAIT_S)
        layout = layouts.MemoryLayoutDesc(shapes=[shape], dtypes=[self._torch.float16])
        metadata = transfer.EngineDrivenContextMetadata(
            layout_desc=layout, block_size=CHUNK_TOKENS, use_mla=False
        )
        return transfer.EngineDrivenContextShm(
            metadata, self._client, WAIT_S, answer.shm_name, answer.pool_size
        )

    def _key(self, keys: Sequence[bytes], worker: int | None, request: str = "") -> Any:
        tokens = np.frombuffer(b"".join(keys), np.uint16).tolist()
        self._requests += 1
        return self._key_type(
            model_name=MODEL,
            world_size=1,
            num_kv_readers=1,
            worker_id=worker,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=request or f"{self._instance}-{self._requests}",
        )

    def _bytes_of(self, slot: Any) -> Bytes:
        flat: Bytes = slot.view(-1).view(self._torch.uint8).numpy()
        return flat
