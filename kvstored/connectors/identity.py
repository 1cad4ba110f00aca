"""Whose KV it is: the namespace of an engine, and the extra keys of a request.

Two engines share blocks exactly when all of this is equal. So what changes the bytes of a block must be in here: the weights (not the
served name), the dtype, the order of the elements, which on CPUs depends on the instruction set, the block size, the groups, the shape.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvstored.core.types import CheckpointPolicy, GroupSpec, NamespaceSpec
from kvstored.core.validation import TEXT_BYTES_MAX, validated

FINGERPRINT_LETTERS = 16
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "*.npz")
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10


def weights_fingerprint(path: Path) -> str:
    """Of a file or a folder of weights: sizes, and samples of the bytes of every file, 1 MiB a file.

    Other weights of the same shape differ in all samples; a change of a few bytes between two samples is not seen. "" where there is nothing.
    """
    files = [path] if path.is_file() else sorted({f for kind in _WEIGHTS for f in path.glob(kind)})
    if not files:
        return ""
    hasher = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        # Not the name: a copy under another name is the same model. The order of the files is that of their names.
        hasher.update(size.to_bytes(8, "little"))
        step = max(size // _SAMPLES, _SAMPLE_BYTES)
        with file.open("rb") as opened:
            for at in range(0, size, step):
                opened.seek(at)
                hasher.update(opened.read(_SAMPLE_BYTES))
            opened.seek(max(size - _SAMPLE_BYTES, 0))
            hasher.update(opened.read(_SAMPLE_BYTES))
    return hasher.hexdigest()[:FINGERPRINT_LETTERS]


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
