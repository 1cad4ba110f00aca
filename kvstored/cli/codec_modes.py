"""Everything that a block of KV can be coded with, ours and others', measured alike: bytes, and CPU time."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import zstandard

from kvstored.codec import blocks, planner
from kvstored.codec.blocks import Known
from kvstored.codec.elements import FORMS, Bytes, Element, element_of
from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import AGAINST, AGAINST_SMALL, Method, Plan, Step
from kvstored.codec.planner import Goal
from kvstored.codec.report import ErrorReport, error_report
from kvstored.errors import InvalidArgument

REPEATS = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """Blocks of one file, each with the same tokens' blocks of the files that it is coded against."""

    name: str
    element: Element
    rows: int
    columns: int
    blocks: tuple[Bytes, ...]
    references: tuple[tuple[Bytes, ...], ...]


@dataclass(frozen=True, slots=True)
class Measured:
    """Rates are plain bytes a second of CPU, the best of three passes. `error` only of lossy modes; `note` says what a plan chose."""

    mode: str
    ratio: float
    encode_rate: float
    decode_rate: float
    error: ErrorReport | None = None
    note: str = ""


Encode = Callable[[int], Bytes | bytes]
Decode = Callable[[int, Bytes | bytes, Bytes], None]


@dataclass(frozen=True, slots=True)
class Mode:
    """`encode` codes block number i; `decode` fills the given memory from what `encode` gave."""

    name: str
    encode: Encode
    decode: Decode
    is_lossy: bool = False
    note: str = ""


def lossless_modes(subject: Subject) -> list[Mode]:
    modes = [_framed(subject, str(step), _plan(subject, step)) for step in _steps(subject)]
    for name, goal in (("fast", Goal.SPEED), ("small", Goal.RATIO)):
        plan = planner.plan_for(subject.blocks[0], subject.element, subject.rows, goal=goal)
        modes.append(_framed(subject, f"plan {name}", plan, note=str(plan)))
    if subject.references:
        for name, against in (("", AGAINST), (" small", AGAINST_SMALL)):
            plan = replace(_plan(subject, Step(Method.RAW)), against=against)
            modes.append(_framed(subject, f"P frame{name}", plan, against=1))
            if len(subject.references) > 1:
                modes.append(_framed(subject, f"B frame{name}", plan, against=2))
    return modes


def lossy_modes(subject: Subject) -> list[Mode]:
    """CacheGen-like: per-token levels, 32 in the first third of the sections (layers), 16 in the rest. KIVI-like: INT4 by channel for K, by token for V."""
    if subject.element is Element.OPAQUE:
        return []
    named = [
        ("int8 by token", Step(Method.UNIFORM, Grid.INT8)),
        ("int4 by token", Step(Method.UNIFORM, Grid.INT4)),
        ("int4 by channel", Step(Method.UNIFORM, Grid.INT4 | BY_CHANNEL)),
        ("fp4 by token", Step(Method.UNIFORM, Grid.FP4)),
        ("int2 by channel", Step(Method.UNIFORM, Grid.INT2 | BY_CHANNEL)),
        *((f"rotated {bits} bit", Step(Method.ROTATED, bits)) for bits in (4, 3, 2)),
        *((f"bounded sigma/{1 << power}", Step(Method.BOUNDED, power)) for power in (6, 5, 4)),
    ]
    modes = [_framed(subject, name, _plan(subject, step)) for name, step in named]
    plan = _plan(subject, Step(Method.UNIFORM, Grid.LEVELS_16))
    count = -(-len(subject.blocks[0]) // plan.section_bytes)
    levels = [Grid.LEVELS_32 if 3 * i < count else Grid.LEVELS_16 for i in range(count)]
    steps = tuple(Step(Method.UNIFORM, level) for level in levels)
    by_layer = Plan(plan.element, steps, plan.rows, plan.columns, plan.section_bytes)
    modes.append(_framed(subject, "levels by layer", by_layer))
    if subject.references:
        for power in (6, 5, 4):
            bounded = _plan(subject, Step(Method.BOUNDED, power))
            modes.append(_framed(subject, f"P bounded sigma/{1 << power}", bounded, against=1))
    return modes


def other_modes(subject: Subject) -> list[Mode]:
    """zstd alone, and the public tools that are installed here."""
    modes = [_zstd(subject, level) for level in (1, 3)]
    for maker in (_zipnn, _blosc2):
        mode = maker(subject)
        if mode is not None:
            modes.append(mode)
    return modes


def measure(mode: Mode, subject: Subject) -> Measured:
    """Every block is decoded and, unless the mode is lossy, compared."""
    plain = sum(len(block) for block in subject.blocks)
    encode_s = decode_s = float("inf")
    stored = [mode.encode(i) for i in range(len(subject.blocks))]
    decoded = [np.zeros_like(block) for block in subject.blocks]
    for _ in range(REPEATS):
        encode_s = min(encode_s, _seconds(lambda: [mode.encode(i) for i in range(len(stored))]))
        decode_s = min(
            decode_s,
            _seconds(lambda: _decode_all(mode, stored, decoded)),
        )
    error = None
    if mode.is_lossy:
        whole = np.concatenate(subject.blocks), np.concatenate(decoded)
        error = error_report(*whole, subject.element)
    elif not all(map(np.array_equal, subject.blocks, decoded)):
        raise AssertionError(f"mode is not exact: mode={mode.name}")
    return Measured(
        mode.name,
        plain / sum(len(each) for each in stored),
        plain / max(encode_s, 1e-9),
        plain / max(decode_s, 1e-9),
        error,
        mode.note,
    )


def _decode_all(mode: Mode, stored: Sequence[Bytes | bytes], decoded: Sequence[Bytes]) -> None:
    for i, each in enumerate(stored):
        mode.decode(i, each, decoded[i])


def _seconds(work: Callable[[], object]) -> float:
    """CPU time of the process: ZipNN works in threads of its own."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _steps(subject: Subject) -> Sequence[Step]:
    steps = [Step(Method.ZSTD, 1), Step(Method.PLANES)]
    if FORMS[subject.element].width_bytes > 1:
        steps.append(Step(Method.EXPONENTS))
    if subject.element is not Element.OPAQUE:
        steps += [Step(Method.SYMBOLS), Step(Method.SYMBOLS, 4)]
    return [*steps, Step(Method.TOKENS), Step(Method.TOKENS, 16)]


def _plan(subject: Subject, step: Step) -> Plan:
    """Sections of whole tiles, about 256 KiB."""
    tile_bytes = subject.rows * subject.columns * FORMS[subject.element].width_bytes
    section_bytes = max((256 << 10) // tile_bytes, 1) * tile_bytes
    return Plan(subject.element, (step,), subject.rows, subject.columns, section_bytes)


def _framed(subject: Subject, name: str, plan: Plan, *, against: int = 0, note: str = "") -> Mode:
    references = [
        [blocks.known(b"reference", each[i]) for each in subject.references[:against]]
        for i in range(len(subject.blocks))
    ]

    def decode(i: int, stored: Bytes | bytes, target: Bytes) -> None:
        assert isinstance(stored, np.ndarray)
        blocks.decode(stored, target, references[i])

    def encode(i: int) -> Bytes:
        known: Sequence[Known] = references[i]
        return blocks.encode(subject.blocks[i], plan, known)

    return Mode(name, encode, decode, plan.is_lossy, note)


def _zstd(subject: Subject, level: int) -> Mode:
    compressor = zstandard.ZstdCompressor(level=level)
    decompressor = zstandard.ZstdDecompressor()

    def decode(_: int, stored: Bytes | bytes, target: Bytes) -> None:
        target[:] = np.frombuffer(decompressor.decompress(bytes(stored)), dtype=np.uint8)

    return Mode(
        f"zstd {level} alone", lambda i: compressor.compress(subject.blocks[i].data), decode
    )


def _zipnn(subject: Subject) -> Mode | None:
    try:
        import zipnn
    except ImportError:
        return None
    names = {Element.BF16: "bfloat16", Element.F16: "float16", Element.F32: "float32"}
    if subject.element not in names:
        return None
    coder = zipnn.ZipNN(input_format="byte", bytearray_dtype=names[subject.element], threads=1)

    def decode(_: int, stored: Bytes | bytes, target: Bytes) -> None:
        target[:] = np.frombuffer(coder.decompress(stored), dtype=np.uint8)

    return Mode("ZipNN", lambda i: bytes(coder.compress(subject.blocks[i].tobytes())), decode)


def _blosc2(subject: Subject) -> Mode | None:
    try:
        import blosc2
    except ImportError:
        return None
    blosc2.set_nthreads(1)
    width = FORMS[subject.element].width_bytes

    def encode(i: int) -> bytes:
        packed: bytes = blosc2.compress2(
            subject.blocks[i],
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            typesize=width,
            filters=[blosc2.Filter.SHUFFLE],
            nthreads=1,
        )
        return packed

    def decode(_: int, stored: Bytes | bytes, target: Bytes) -> None:
        target[:] = np.frombuffer(blosc2.decompress2(stored, nthreads=1), dtype=np.uint8)

    return Mode("blosc2 shuffle zstd", encode, decode)


def checked_element(
    dtype: str, array: "np.ndarray[tuple[int, ...], np.dtype[np.generic]]"
) -> Element:
    """The element that `dtype` names, or that the file's own dtype means; numpy has no bfloat16, so 16-bit integers are that."""
    name = dtype or {"uint16": "bfloat16", "int16": "bfloat16"}.get(
        str(array.dtype), str(array.dtype)
    )
    element = element_of(name)
    if FORMS[element].width_bytes != array.dtype.itemsize:
        if element is Element.OPAQUE and not dtype:
            return element
        raise InvalidArgument(
            f"dtype does not fit the file: dtype={name} file has {array.dtype}; name it with --dtype"
        )
    return element
