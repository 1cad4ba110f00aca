"""Words of the core as values: tiers, parts, groups, namespaces, places, pieces and the results of calls.

Values only, no behaviour beyond derived properties. A *block* is a run of tokens named by its key. Its bytes fall into *groups*;
groups that are placed alike form a *part*; a *copy* is one part of one block in one tier, made of *pieces*, one a (group, shard).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple, NewType

import numpy as np
from numpy.typing import NDArray

NamespaceId = NewType("NamespaceId", int)
BlockRow = NewType("BlockRow", int)
PieceRow = NewType("PieceRow", int)
SessionId = NewType("SessionId", int)

Rows = NDArray[np.int32]
"""Row numbers of one table; -1 where there is none."""
Fingerprints = NDArray[np.uint64]
"""Shape (n, 2): the 128-bit fingerprint of each key within its namespace."""

UNIT_BYTES = 4096
"""The unit of every tier's allocator: a place is a list of runs of such units."""
EXTENTS_MAX = 64
"""A piece lies in at most so many extents."""
BATCH_KEYS_MAX = 4096
"""Keys in one call."""
KEY_BYTES_MIN, KEY_BYTES_MAX = 8, 64
GROUPS_MAX = 32
SHARDS_MAX = 1024


class TierId(IntEnum):
    """Lower is faster."""

    HBM = 0
    DRAM = 1
    NVME = 2
    REMOTE = 3


class Part(IntEnum):
    """What is placed and evicted together: dense required groups, sparse required groups, window and state groups."""

    DENSE = 0
    SPARSE = 1
    CHECKPOINT = 2


class Budget(IntEnum):
    """Shares of a tier that never evict each other."""

    GLOBAL = 0
    CHECKPOINT = 1


class Heat(IntEnum):
    """Temperature classes, hottest first."""

    SINK = 0
    RECENT = 1
    SHARED = 2
    COLD = 3


class GroupKind(StrEnum):
    LINEAR = "linear"
    COMPRESSED = "compressed"
    WINDOW = "window"
    STATE = "state"


class Access(StrEnum):
    DENSE = "dense"
    SPARSE = "sparse"


class CheckpointPolicy(StrEnum):
    """At which block boundaries window and state groups are stored."""

    FULL = "full"
    PERIODIC = "periodic"
    BOUNDARY = "boundary"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV group of a namespace.

    `bytes_per_block`: bytes of a full block of one shard (linear, compressed, per-block window), or of one blob (state,
    boundary window). `ratio`: tokens a row (1 linear, m compressed). `window_tokens`: W of a window group. `per_block`: a window group
    that is stored with every block, usable at a boundary when the last ceil((W-1)/block_tokens) blocks have it; else one blob at the
    boundary. `sharded`: every shard has bytes of its own; else the group is replicated and stored once, as shard 0.
    `retention_s`: life of window and state copies; 0 for the daemon's default.
    """

    name: str
    kind: GroupKind
    bytes_per_block: int
    ratio: int = 1
    window_tokens: int = 0
    per_block: bool = False
    access: Access = Access.DENSE
    sharded: bool = False
    lossy_ok: bool = False
    resident: bool = False
    retention_s: int = 0

    @property
    def is_required(self) -> bool:
        """Linear and compressed groups commit together or not at all; window and state are optional at each boundary."""
        return self.kind in (GroupKind.LINEAR, GroupKind.COMPRESSED)

    @property
    def part(self) -> Part:
        if not self.is_required:
            return Part.CHECKPOINT
        return Part.SPARSE if self.access is Access.SPARSE else Part.DENSE


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """What makes two blocks interchangeable; its canonical encoding is hashed to the namespace digest (core/namespace.py).

    `model`: bare name; `revision`: weights fingerprint or revision; the alias is model@revision. `layout` and `layout_version` name the
    order of the elements; `tp`, `pp`: the shape, never the rank; shards = tp * pp. `engine_page_tokens`: the engine's own page, block_tokens is a
    multiple of it. `flops_base` + `flops_slope` x position: prefill FLOPs a token, for accounting; not part of the digest.
    """

    model: str
    revision: str
    dtype: str
    layout: str
    layout_version: int
    block_tokens: int
    groups: tuple[GroupSpec, ...]
    tp: int = 1
    pp: int = 1
    tenant: str = "default"
    engine_page_tokens: int = 1
    sink_tokens: int = 64
    recent_tokens: int = 128
    checkpoint_policy: CheckpointPolicy = CheckpointPolicy.BOUNDARY
    checkpoint_period_tokens: int = 0
    mutable: bool = False
    flops_base: float = 0.0
    flops_slope: float = 0.0

    @property
    def shards(self) -> int:
        return self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Layout:
    """An open namespace as the catalog sees it: `seed` salts the fingerprints so that equal keys of two namespaces differ.

    `required`: the groups that a readable block has; `is_plain`: one group, and of it one piece a block, which is kept exactly.
    """

    id: NamespaceId
    digest: bytes
    seed: int
    spec: NamespaceSpec
    required: tuple[int, ...] = field(init=False)
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        groups = self.spec.groups
        required = tuple(i for i, group in enumerate(groups) if group.is_required)
        is_exact = not any(group.lossy_ok for group in groups)
        is_plain = len(groups) == len(required) == self.pieces_of(groups[0].part) == 1
        object.__setattr__(self, "required", required)
        object.__setattr__(self, "is_plain", is_plain and is_exact)

    def groups_of(self, part: Part) -> tuple[int, ...]:
        return tuple(i for i, group in enumerate(self.spec.groups) if group.part is part)

    def pieces_of(self, part: Part) -> int:
        """Pieces of a whole copy of this part: one a (group, shard)."""
        return sum(
            self.spec.shards if self.spec.groups[i].sharded else 1 for i in self.groups_of(part)
        )


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Keys of one call within one namespace: `packed` holds n keys of `key_bytes` each; made by core/keys.py."""

    packed: bytes
    key_bytes: int
    fingerprints: Fingerprints

    def __len__(self) -> int:
        return len(self.fingerprints)

    def key(self, i: int) -> bytes:
        return self.packed[i * self.key_bytes : (i + 1) * self.key_bytes]


def chosen_keys(keys: KeyBatch, rows: NDArray[np.int64]) -> KeyBatch:
    """Those at these indexes, in this order."""
    packed = np.frombuffer(keys.packed, dtype=np.uint8).reshape(len(keys), keys.key_bytes)
    return KeyBatch(packed[rows].tobytes(), keys.key_bytes, keys.fingerprints[rows])


class Extent(NamedTuple):
    """A run of `units` allocation units from unit `start` of segment (or slab file) `segment`."""

    segment: int
    start: int
    units: int


Place = tuple[Extent, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """Blocks count from the head of the path; all times are seconds from now, for the whole hit unless said.

    `load_s`, `load_bytes`: of what lies in each tier, by TierId. `prefill_s` and the splits are those of a known prefill speed, else 0 and the whole hit.
    `split`: load so many blocks first, then compute the rest of the hit; `overlap`: compute so many first blocks while the others load.
    `deadline`: blocks that can be loaded by then; the whole hit where none was given.
    """

    load_bytes: tuple[int, int, int, int]
    load_s: tuple[float, float, float, float]
    queue_s: float
    total_load_s: float
    prefill_s: float
    prefill_source: str
    split_blocks: int
    split_tokens: int
    split_s: float
    overlap_blocks: int
    overlap_s: float
    deadline_blocks: int
    deadline_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """What a prefix of keys finds: blocks and tokens of the longest readable run, and the last usable checkpoint within it."""

    hit_blocks: int
    hit_tokens: int
    checkpoint_tokens: int
    replay_tokens: int
    tier_blocks: tuple[int, int, int, int]
    """Of hit_blocks, how many are read from each tier (a block counts for its slowest required part)."""
    miss_reason: str
    lossy_blocks: int = 0
    """Of hit_blocks, how many are near what was put and not equal."""
    advice: Advice | None = None
    """Whether loading them is worth it, where that was asked."""


def as_rows(values: Sequence[int]) -> Rows:
    return np.asarray(values, dtype=np.int32)
