"""Which frame each piece gets on its way to a slower tier: raw, one zstd frame, or what the planner chose for its group.

A plan is made of the first full block of a group that comes by, and made anew at its 64th, 4,096th and 262,144th: text at the start of a namespace may not be
like the rest. Called from the lanes' threads.
"""

import threading
import time
from dataclasses import dataclass, replace

import numpy as np

from kvstored.codec import blocks, frame, header, planner
from kvstored.codec.blocks import Known
from kvstored.codec.elements import Bytes, Element, element_of
from kvstored.codec.frame import Codec
from kvstored.codec.levels import Levels, level_of
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.planner import DELTA_MIN_CONTEXT_TOKENS, Goal
from kvstored.core.frames import SMALLEST_BYTES
from kvstored.core.types import UNIT_BYTES, GroupKind, GroupSpec, Layout, NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.tiers import slabs
from kvstored.tiers import views as memory
from kvstored.tiers.base import Views
from kvstored.tiers.record import Record
from kvstored.tiers.values import LOSSY

NO_LEVELS: Levels = {}
_REPLAN_AT = frozenset((64, 4096, 262_144))


@dataclass(frozen=True, slots=True)
class Encoded:
    """`checksum`: xxh3-64 of the stored bytes. `refers`: a P frame. `decoded_checksum`: of what they decode to, where that is not what was put."""

    codec: Codec
    stored: Views
    checksum: int
    refers: bool = False
    decoded_checksum: int | None = None


@dataclass(frozen=True, slots=True)
class GroupCoding:
    """What is known of one group of a namespace: its plan, and bytes before and after it since the start, all and of P frames alone; what was decoded,
    and the seconds of a thread's CPU that both took. `plan` is empty until a full block came."""

    digest: bytes
    group: str
    plan: str
    plain_bytes: int
    stored_bytes: int
    p_plain_bytes: int
    p_stored_bytes: int
    encode_s: float
    decoded_bytes: int
    decode_s: float


@dataclass(slots=True)
class _Group:
    spec: GroupSpec
    namespace: NamespaceSpec
    plan: Plan | None = None
    full_blocks: int = 0
    plain_bytes: int = 0
    stored_bytes: int = 0
    p_plain_bytes: int = 0
    p_stored_bytes: int = 0
    encode_s: float = 0.0
    decoded_bytes: int = 0
    decode_s: float = 0.0

    @property
    def rows(self) -> int:
        """Of a full block; 1 where the group has none."""
        is_blob = self.spec.kind is GroupKind.STATE or (
            self.spec.kind is GroupKind.WINDOW and not self.spec.per_block
        )
        return 1 if is_blob else self.namespace.block_tokens // self.spec.ratio


class Coding:
    """One a tier. `codec` FRAME lets the planner choose for `goal`; RAW and ZSTD are the same for all pieces. `may_refer`: pieces may be stored as what
    they differ by from others."""

    def __init__(
        self,
        codec: Codec,
        *,
        level: int = frame.LEVEL_DEFAULT,
        goal: Goal = Goal.SPEED,
        delta_min_context_tokens: int = DELTA_MIN_CONTEXT_TOKENS,
        references: bool = True,
        lossy: Levels = NO_LEVELS,
    ) -> None:
        self.may_refer = references and codec is Codec.FRAME
        self._lossy = lossy
        self._codec = codec
        self._level = level
        self._goal = goal
        self._delta_min_context_tokens = delta_min_context_tokens
        self._groups: dict[tuple[bytes, int], _Group] = {}
        self._lock = threading.Lock()

    def learn(self, layout: Layout) -> None:
        """What a namespace's blocks are made of. Pieces of namespaces that are not known are stored raw."""
        with self._lock:
            for i, group in enumerate(layout.spec.groups):
                self._groups.setdefault((layout.digest, i), _Group(group, layout.spec))

    def forget(self, digest: bytes) -> None:
        """A namespace that was removed."""
        with self._lock:
            for key in [key for key in self._groups if key[0] == digest]:
                del self._groups[key]

    def may_pack(self, digest: bytes, group: int, length: int) -> bool:
        """Whether a piece could become smaller: who moves many raw pieces at once asks, and takes that way only where this says no."""
        if self._codec is not Codec.FRAME:
            return self._codec is Codec.ZSTD
        known = self._groups.get((digest, group))
        if known is None or length < SMALLEST_BYTES:
            return False
        return known.plan is None or not known.plan.is_raw

    def encoded(self, record: Record, source: Views, reference: Known | None = None) -> Encoded:
        """`source` is the piece that `record` describes, whose checksum was compared; the result lives as long as `source`.

        `reference`: a piece that may be like it; a P frame against it where a sample says so.
        """
        packed: Bytes | None = None
        if self._codec is Codec.ZSTD:
            packed = frame.compressed(source, self._level)
        elif self._codec is Codec.FRAME and record.length >= SMALLEST_BYTES:
            packed = self._framed(record, source, reference)
        if packed is None or units_of(len(packed)) >= units_of(record.length):
            return Encoded(Codec.RAW, source, record.checksum)
        checksum = memory.hash_of([packed])
        if self._codec is not Codec.FRAME:
            return Encoded(self._codec, [packed], checksum)
        made = header.parse(packed, plain_bytes_max=record.length)
        decoded_checksum = made.checksum if made.is_lossy else None
        return Encoded(self._codec, [packed], checksum, bool(made.references), decoded_checksum)

    def shown(self) -> tuple[GroupCoding, ...]:
        with self._lock:
            return tuple(
                GroupCoding(
                    digest,
                    known.spec.name,
                    str(known.plan) if known.plan is not None else "",
                    known.plain_bytes,
                    known.stored_bytes,
                    known.p_plain_bytes,
                    known.p_stored_bytes,
                    known.encode_s,
                    known.decoded_bytes,
                    known.decode_s,
                )
                for (digest, _), known in self._groups.items()
            )

    def decoded(self, record: Record, decode_s: float) -> None:
        """A piece was read, and its frame (and what it refers to) took so much CPU."""
        known = self._groups.get((record.digest, record.group))
        if known is not None:
            with self._lock:
                known.decoded_bytes += record.length
                known.decode_s += decode_s

    def _framed(self, record: Record, source: Views, reference: Known | None) -> Bytes | None:
        """None where the group's plan is raw or not made yet, and this is no full block to make it of."""
        known = self._groups.get((record.digest, record.group))
        if known is None:
            return None
        level = self._level_of(known.spec, record)
        is_due = self._counted(known, record.length)
        is_raw = known.plan is None or (known.plan.is_raw and reference is None and level is None)
        if not is_due and is_raw:
            return None
        plain = joined(source)
        if is_due:  # two threads may both plan: either plan will do
            known.plan = planner.plan_for(
                plain,
                element_of(known.namespace.dtype),
                known.rows,
                goal=self._goal,
                context_tokens=(record.depth + 1) * known.namespace.block_tokens,
                delta_min_context_tokens=self._delta_min_context_tokens,
            )
        if known.plan is None:
            return None
        plan = known.plan.for_share(len(plain), known.spec.bytes_per_block)
        near = [reference] if reference and planner.is_near(plain, reference.plain, plan) else []
        if level is not None:  # of these only bounded ones gain from a reference
            plan = replace(plan, steps=(level,))
            near = near if level.method is Method.BOUNDED else []
        if plan.is_raw and not near:
            return None
        begun_s = time.thread_time()
        out = slabs.aligned(blocks.stored_bytes_max(len(plain), plan, len(near)))
        packed = out[: blocks.encode_into(out, plain, plan, near)]
        took_s = time.thread_time() - begun_s
        self._note(known, len(plain), min(len(packed), len(plain)), took_s, is_p=bool(near))
        return packed

    def _level_of(self, group: GroupSpec, record: Record) -> Step | None:
        """How far from exact this piece may be stored. One that is not exact any more loses no more."""
        level = level_of(self._lossy, group, record.heat)
        if level is None or record.flags & LOSSY:
            return None
        try:
            planner.check_lossy(group, Plan(Element.OPAQUE, (level,)))
        except InvalidArgument:
            return None
        return level

    def _note(
        self, known: _Group, plain_bytes: int, stored_bytes: int, took_s: float, *, is_p: bool
    ) -> None:
        with self._lock:
            known.encode_s += took_s
            known.plain_bytes += plain_bytes
            known.stored_bytes += stored_bytes
            known.p_plain_bytes += plain_bytes * is_p
            known.p_stored_bytes += stored_bytes * is_p

    def _counted(self, known: _Group, length: int) -> bool:
        """Whether a plan is to be made of this piece."""
        if length != known.spec.bytes_per_block:
            return False
        with self._lock:
            known.full_blocks += 1
            return known.plan is None or known.full_blocks in _REPLAN_AT


def joined(source: Views) -> Bytes:
    """One array of the whole piece: itself where it is one already."""
    if len(source) == 1:
        return source[0]
    whole = np.empty(memory.size_of(source), dtype=np.uint8)
    memory.copy(source, [whole])
    return whole


def units_of(size_bytes: int) -> int:
    return -(-size_bytes // UNIT_BYTES)
