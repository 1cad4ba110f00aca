"""A replay with real KV behind changing system prompts, through the whole daemon: bytes on NVMe and on the wire, CPU, and time to the first token.

The same document is asked about behind prompts that name other dates and users: its first block differs, the tokens of all others do not.
Each codec stores it with and without content keys in a daemon of its own; then memory is dropped and everything is read back and compared, first
with all blocks there, then with the first prompt's blocks removed (what others refer to), each time bit by bit.

`python -m bench.frames FOLDER`, where FOLDER has a pair `kv_N.npy` ([layer, K or V, head, token, channel], bfloat16 bits) and `ids_N.npy` a prompt, as
`--capture` makes them with SmolLM2 (packages as `bench.codec_capture` says).
"""

import argparse
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.machine import Daemon
from kvstored.client import Client, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.pb import kvstored_pb2 as pb

BLOCK_TOKENS = 256
DATES = ("Monday, 3 March 2025", "Friday, 8 August 2025", "Tuesday, 2 January 2025")
USERS = ("Alice Becker", "Bruno Keller")
CODECS = ("raw", "fast", "small")
WAIT_S = 120.0
GB = 1e9
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Prompt:
    ids: NDArray[np.int64]
    blocks: tuple[Bytes, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of all prompts: bytes on NVMe and what the daemon's CPU took."""

    stored_bytes: int
    write_cpu_s: float
    read_cpu_s: float
    read_s: float


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("folder", type=Path)
    flags.add_argument("--capture", action="store_true", help="make the files with SmolLM2 first")
    flags.add_argument("--state-parent", type=Path, default=None)
    given = flags.parse_args()
    if given.capture:
        _capture(given.folder)
    prompts = _prompts(given.folder)
    plain = sum(len(block) for prompt in prompts for block in prompt.blocks)
    repeated = sum(len(block) for prompt in prompts[1:] for block in prompt.blocks[1:])
    print(f"{len(prompts)} prompts, {plain / GB:.3f} GB, of which repeated {repeated / GB:.3f} GB")
    for codec in CODECS:
        alone = _replayed(prompts[:1], codec, given.state_parent, with_content=True)
        for with_content in (False, True):
            cost = _replayed(prompts, codec, given.state_parent, with_content=with_content)
            # what the later prompts take beside the first one and blocks of their own
            own = (alone.stored_bytes / len(prompts[0].blocks)) * (len(prompts) - 1)
            more = cost.stored_bytes - alone.stored_bytes - own
            print(
                f"{codec:6} {'content keys' if with_content else 'none':13} stored {cost.stored_bytes / GB:.4f} GB "
                f"{plain / cost.stored_bytes:.2f}x, repeated part {repeated / more:.2f}x; CPU s/GB written {cost.write_cpu_s / plain * GB:.2f} "
                f"read {cost.read_cpu_s / plain * GB:.2f}; read at {plain / cost.read_s / GB:.2f} GB/s",
                flush=True,
            )


def _capture(folder: Path) -> None:
    from bench import codec_capture as capture

    path = capture.model_path()
    model, tokenizer = capture.Model(path, capture.to_bf16), capture.tokenizer_of(path)
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        tokenizer.encode(capture.SYSTEM.format(date=date, user=user), add_special_tokens=False).ids
        for date, user in product(DATES, USERS)
    ]
    heads = [head for head in made if len(head) == len(made[0])]
    for name, text in capture.texts().items():
        body = tokenizer.encode(text, add_special_tokens=False).ids
        for i, head in enumerate(heads):
            ids = np.asarray((head + body)[:2048])
            np.save(folder / f"kv_{name}_{i}.npy", capture.bits_of(model.run(ids)[0]))
            np.save(folder / f"ids_{name}_{i}.npy", ids)


def _prompts(folder: Path) -> list[Prompt]:
    made = []
    for path in sorted(folder.glob("kv_*.npy")):
        kv, ids = np.load(path), np.load(path.with_name(path.name.replace("kv_", "ids_", 1)))
        count = len(ids) // BLOCK_TOKENS
        cut = (
            np.ascontiguousarray(kv[..., i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS, :])
            for i in range(count)
        )
        blocks = tuple(block.reshape(-1).view(np.uint8) for block in cut)
        made.append(Prompt(ids[: count * BLOCK_TOKENS], blocks))
    return made


def _replayed(
    prompts: list[Prompt], codec: str, state_parent: Path | None, *, with_content: bool
) -> Cost:
    """One after the other, as requests come; the later ones are written when the first is."""
    size = len(prompts[0].blocks[0])
    spec = NamespaceSpec(
        model="smollm2-135m",
        revision="bench",
        dtype="bfloat16",
        layout="layer-kv-head-token-channel",
        layout_version=1,
        block_tokens=BLOCK_TOKENS,
        groups=(GroupSpec("kv", GroupKind.LINEAR, size),),
    )
    settings = {"KVSTORED_DISK_CODEC": codec}
    with (
        Daemon(dram="2GiB", disk="4GiB", state_parent=state_parent, settings=settings) as daemon,
        Client(daemon.address, timeout_s=60) as client,
    ):
        namespace = client.open_namespace(spec)
        begun_s = _cpu_s(daemon)
        keys = []
        for prompt in prompts:
            mine = namespace.keys(prompt.ids)
            keys.append(mine if with_content else replace(mine, content_keys=()))
            namespace.put(keys[-1], list(prompt.blocks))
            _written(client)
        stored = _nvme(client).used_bytes
        write_cpu_s = _cpu_s(daemon) - begun_s
        _restart(daemon, client)
        begun_s, begun = _cpu_s(daemon), time.perf_counter()
        _check(namespace, keys, prompts)
        read_s, read_cpu_s = time.perf_counter() - begun, _cpu_s(daemon) - begun_s
        namespace.remove(keys[0])
        _restart(daemon, client)
        _check(namespace, keys[1:], prompts[1:])
        return Cost(stored, write_cpu_s, read_cpu_s, read_s)


def _restart(daemon: Daemon, client: Client) -> None:
    """Memory is gone, and what is on NVMe is known again."""
    daemon.restart()
    ends_s = time.perf_counter() + WAIT_S
    while client.call("Stat", pb.StatRequest(), pb.StatResponse).recovering:
        assert time.perf_counter() < ends_s, "recovery takes too long"
        time.sleep(0.02)


def _check(namespace: Namespace, keys: list[Keys], prompts: list[Prompt]) -> None:
    for mine, prompt in zip(keys, prompts, strict=True):
        got = namespace.get(mine, load_deadline_s=WAIT_S, timeout_s=WAIT_S)
        for found, block in zip(got.blocks, prompt.blocks, strict=True):
            assert found is not None, f"a block is missing: reason={got.miss_reason}"
            assert np.array_equal(found[0], block), "a block is not what was put"


def _nvme(client: Client) -> pb.TierStat:
    return client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[1]


def _written(client: Client) -> None:
    ends_s = time.perf_counter() + WAIT_S
    while client.call("Stat", pb.StatRequest(), pb.StatResponse).tiers[0].dirty_copies:
        assert time.perf_counter() < ends_s, "write-back takes too long"
        time.sleep(0.02)


def _cpu_s(daemon: Daemon) -> float:
    """Of keeper, daemon and front."""
    root = psutil.Process(daemon.pid)
    times = [each.cpu_times() for each in (root, *root.children(recursive=True))]
    return sum(each.user + each.system for each in times)


if __name__ == "__main__":
    main()
