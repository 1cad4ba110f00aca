"""Whose KV it is: the namespace of an engine, and the extra keys of a request.

Two engines share blocks exactly when all of this is equal. So what changes the bytes of a block must be in here: the weights (not the
served name), the dtype, the order of the elements, which on CPUs depends on the instruction set, the block size, the groups, the shape.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from kvstored.core.types import CheckpointPolicy, GroupSpec, NamespaceSpec
from kvstored.core.validation import TEXT_BYTES_MAX, validated

FINGERPRINT_LETTERS = 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.npz")
_SAMPLE_BYTES = 16 << 10
_STEP_BYTES = 256 << 10
_HEADER_BYTES_MAX = 100 << 20
_BLOB = re.compile(r"[0-9a-f]{64}")
"""What the hub's cache names a file of weights by: the SHA-256 of its content."""


def weights_fingerprint(path: Path) -> str:
    """Of a file or a folder of weights; "" where there is nothing.

    Every tensor of safetensors files is looked at in three places, so that a model of which one layer was changed is another one; other
    files at every 256 KiB. A change of single elements in between is not seen: such weights need a revision of their own. Reads 48 KiB a tensor.
    """
    files = [path] if path.is_file() else sorted({f for kind in _WEIGHTS for f in path.glob(kind)})
    if not files:
        return ""
    hasher = hashlib.sha256()
    for file in files:
        blob = file.resolve().name
        if _BLOB.fullmatch(blob):
            hasher.update(bytes.fromhex(blob))
            continue
        with file.open("rb") as opened:
            # Not the name: a copy under another name is the same model. The order of the files is that of their names.
            size = opened.seek(0, os.SEEK_END)
            hasher.update(size.to_bytes(8, "little"))
            for at in _samples(opened, size, is_safetensors=file.suffix == ".safetensors"):
                opened.seek(at)
                hasher.update(opened.read(_SAMPLE_BYTES))
    return hasher.hexdigest()[:FINGERPRINT_LETTERS]


def _samples(opened: BinaryIO, size: int, *, is_safetensors: bool) -> Iterator[int]:
    """Where to look; the head of the file, with the names of tensors, among them."""
    yield from range(0, size, _STEP_BYTES)
    yield max(size - _SAMPLE_BYTES, 0)
    if not is_safetensors:
        return
    for start, end in _tensors(opened, size):
        yield start
        yield max((start + end - _SAMPLE_BYTES) // 2, start)
        yield max(end - _SAMPLE_BYTES, start)


def _tensors(opened: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Where they lie in a safetensors file; none where it is not one."""
    opened.seek(0)
    header_bytes = int.from_bytes(opened.read(8), "little")
    if header_bytes > min(size, _HEADER_BYTES_MAX):
        return []
    try:
        header = json.loads(opened.read(header_bytes))
        ranges = [told["data_offsets"] for name, told in header.items() if name != "__metadata__"]
        first = 8 + header_bytes
        return [(first + int(start), first + int(end)) for start, end in ranges]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def revision_of(weights: str, facts: Mapping[str, object]) -> str:
    """One text for the weights (their fingerprint, or the commit of a hub) and whatever else changes what they compute: the model's
    configuration, quantisation, overrides.
    """
    text = json.dumps([weights, facts], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_LETTERS]


def namespace_of(
    *,
    model: str,
    revision: str,
    dtype: str,
    layout: str,
    layout_version: int,
    block_tokens: int,
    groups: Sequence[GroupSpec],
    tp: int = 1,
    pp: int = 1,
    tenant: str = "default",
    engine_page_tokens: int = 1,
    checkpoint_policy: CheckpointPolicy = CheckpointPolicy.FULL,
) -> NamespaceSpec:
    """A validated specification; texts are made to fit what a namespace takes. Raises InvalidArgument where it makes no sense."""
    return validated(
        NamespaceSpec(
            model=_fitting(model.replace("@", "-")),
            revision=_fitting(revision),
            dtype=_fitting(dtype),
            layout=_fitting(layout),
            layout_version=layout_version,
            block_tokens=block_tokens,
            groups=tuple(groups),
            tp=tp,
            pp=pp,
            tenant=tenant,
            engine_page_tokens=engine_page_tokens,
            checkpoint_policy=checkpoint_policy,
        )
    )


def extra_keys(
    *, salt: str | None = None, lora: str | None = None, multimodal: Iterable[str] = ()
) -> tuple[bytes, ...]:
    """What makes a request's KV its own. Each is tagged, so that a salt never reads as an adapter's name."""
    tagged = [("salt", salt), ("lora", lora), *(("multimodal", each) for each in multimodal)]
    return tuple(_bounded(f"{tag}:{text}".encode()) for tag, text in tagged if text is not None)


def cpu_isa(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instruction set that CPU kernels choose their layouts by: amx, avx512, avx2 or the machine's name."""
    flags: set[str] = set()
    try:
        for line in cpuinfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    except OSError:
        return "unknown"
    order = {"amx": "amx_tile", "avx512": "avx512f", "avx2": "avx2", "sve": "sve", "neon": "asimd"}
    return next((name for name, flag in order.items() if flag in flags), "generic")


def _fitting(text: str) -> str:
    """Printable and short enough; what would be cut keeps its identity by a hash."""
    printable = "".join(letter if letter.isprintable() else "?" for letter in text) or "unnamed"
    encoded = printable.encode()
    if len(encoded) <= TEXT_BYTES_MAX and printable == text:
        return text
    tail = "~" + hashlib.sha256(text.encode()).hexdigest()[:FINGERPRINT_LETTERS]
    return encoded[: TEXT_BYTES_MAX - len(tail)].decode(errors="ignore") + tail


def _bounded(key: bytes) -> bytes:
    """Long ones by their hash: the API's bound is 4,096 bytes."""
    return key if len(key) <= 1024 else hashlib.sha256(key).digest()
