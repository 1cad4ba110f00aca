"""Real KV between a client and a daemon, as it is and as frames: bytes on the wire, CPU of both ends, and seconds a GB by link: `python -m bench.wire FOLDER`.

FOLDER as `bench.frames` wants it. Everything goes over the bulk channel on this host. A put; then memory is dropped, and a get of blocks that lie on NVMe
(with frames they go as they lie); another that brings them up; and one from memory. Every block is compared. The link is not slowed down: seconds
are max(wire bytes / link, CPU of the sender / cores, CPU of the receiver / cores), from the measured bytes and CPU, with two cores at each end.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.frames import GB, Prompt, _check, _cpu_s, _prompts, _restart, _written
from bench.machine import Daemon
from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec

CORES = 2
LINKS_GB_S = (0.125, 0.5, 1.25, 3.0)
CODECS = ("raw", "lossless")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one pass over all blocks."""

    wire_bytes: int
    client_cpu_s: float
    daemon_cpu_s: float

    def row(self, plain: int) -> str:
        slowest_s = max(self.client_cpu_s, self.daemon_cpu_s) / CORES
        seconds = (
            f"{max(self.wire_bytes / GB / link, slowest_s) / plain * GB:.2f}" for link in LINKS_GB_S
        )
        return (
            f"wire {plain / self.wire_bytes:.2f}x, CPU s/GB client {self.client_cpu_s / plain * GB:.2f} "
            f"daemon {self.daemon_cpu_s / plain * GB:.2f}; s/GB at {LINKS_GB_S} GB/s: {' '.join(seconds)}"
        )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--state-parent", type=Path, default=None)
    given = flags.parse_args()
    prompts = _prompts(given.folder)[:2]
    plain = sum(len(block) for prompt in prompts for block in prompt.blocks)
    print(f"{len(prompts)} prompts, {plain / GB:.3f} GB")
    for codec in CODECS:
        for name, cost in _passes(prompts, codec, given.state_parent).items():
            print(f"{codec:9} {name:22} {cost.row(plain)}", flush=True)


def _passes(prompts: list[Prompt], codec: str, state_parent: Path | None) -> dict[str, Cost]:
    size = len(prompts[0].blocks[0])
    spec = NamespaceSpec(
        model="smollm2-135m", revision="bench", dtype="bfloat16", layout="layer-kv-head-token-channel", layout_version=1,
        block_tokens=256, groups=(GroupSpec("kv", GroupKind.LINEAR, size),),
    )  # fmt: skip
    settings = {"KVSTORED_WIRE_CODEC": codec, "KVSTORED_DISK_REFERENCES": "false"}
    with Daemon(
        dram="2GiB", disk="4GiB", tcp=True, state_parent=state_parent, settings=settings
    ) as daemon:
        costs: dict[str, Cost] = {}
        with Client(daemon.bulk_address, timeout_s=60) as client:
            namespace = client.open_namespace(spec)
            keys = [namespace.keys(prompt.ids) for prompt in prompts]

            def put() -> None:
                for mine, prompt in zip(keys, prompts, strict=True):
                    namespace.put(mine, list(prompt.blocks))

            costs["put"] = _measured(daemon, client, put)
        with Client(daemon.address, timeout_s=60) as local:
            _written(local)
            _restart(daemon, local)
        with Client(daemon.bulk_address, timeout_s=60) as client:
            namespace = client.open_namespace(spec)
            for name in ("get from nvme", "get that brings it up", "get from dram"):
                costs[name] = _measured(daemon, client, _getting(namespace, keys, prompts))
        return costs


def _getting(namespace: Namespace, keys: list[Keys], prompts: list[Prompt]) -> Callable[[], None]:
    return lambda: _check(namespace, keys, prompts)


def _measured(daemon: Daemon, client: Client, work: Callable[[], None]) -> Cost:
    before, cpu_s, client_cpu_s = _wire_bytes(client), _cpu_s(daemon), time.process_time()
    work()
    client_cpu_s = time.process_time() - client_cpu_s
    return Cost(_wire_bytes(client) - before, client_cpu_s, _cpu_s(daemon) - cpu_s)


def _wire_bytes(client: Client) -> int:
    connections = client._transport._bulk._open  # noqa: SLF001 - what it carried is nobody else's to know
    return sum(each._socket.sent_bytes + each._socket.received_bytes for each in connections)  # noqa: SLF001


if __name__ == "__main__":
    main()
