"""What calls of a client answer. A miss, a block that is there already, a full store: results, not errors."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.core.types import NamespaceSpec

Bytes = NDArray[np.uint8]
Block = tuple[Bytes | None, ...]
"""Bytes of one block, one array a selected group; None where the block has nothing for that group."""
Blocks = tuple[Block | None, ...]


@dataclass(frozen=True, slots=True)
class PutResult:
    """One status a key: COMMITTED, PRESENT, IN_PROGRESS (another writer has it), NO_SPACE or LOST."""

    status: tuple[FillStatus, ...]

    @property
    def committed(self) -> int:
        return self.status.count(FillStatus.COMMITTED)

    @property
    def present(self) -> int:
        """Keys that were there before."""
        return self.status.count(FillStatus.PRESENT)

    @property
    def stored(self) -> int:
        """Keys that are there now, by this put or before it."""
        return self.committed + self.present


@dataclass(frozen=True, slots=True)
class Posted:
    """What became of blocks that were posted, by how many had each status of a PutResult."""

    status: Mapping[FillStatus, int]

    @property
    def blocks(self) -> int:
        return sum(self.status.values())

    @property
    def committed(self) -> int:
        return self.status.get(FillStatus.COMMITTED, 0)

    @property
    def present(self) -> int:
        """Keys that were there before."""
        return self.status.get(FillStatus.PRESENT, 0)

    @property
    def stored(self) -> int:
        """Keys that are there now, by a post or before it."""
        return self.committed + self.present


class GetResult:
    """What a get found; `blocks` is made when first asked for.

    `tiers`: the tier that each was read from, 255 for a miss. `corrupt`: hits that did not verify and are misses here. `verified`:
    whether every hit was checked against its checksum. `filled`: of `get_into`, one tuple a key: per selected group, whether its piece
    is in the buffers that were given for it.
    """

    __slots__ = (
        "_blocks",
        "_lossy",
        "corrupt",
        "filled",
        "generations",
        "miss_reason",
        "status",
        "tiers",
        "verified",
    )

    def __init__(
        self,
        *,
        blocks: Blocks | Callable[[], Blocks],
        status: tuple[ReadStatus, ...],
        tiers: bytes,
        generations: tuple[int, ...],
        miss_reason: str,
        corrupt: int,
        verified: bool = True,
        filled: tuple[tuple[bool, ...], ...] = (),
        lossy: bytes = b"",
    ) -> None:
        self._lossy = lossy
        self._blocks = blocks
        self.status = status
        self.tiers = tiers
        self.generations = generations
        self.miss_reason = miss_reason
        self.corrupt = corrupt
        self.verified = verified
        self.filled = filled

    def into_buffers(self, pieces: Collection[int], groups: int) -> "GetResult":
        """The same as the answer of `get_into`: these pieces are in the caller's buffers, those of hits count."""
        there = set(pieces)
        return GetResult(
            blocks=(),
            status=self.status,
            tiers=self.tiers,
            generations=self.generations,
            miss_reason=self.miss_reason,
            corrupt=self.corrupt,
            verified=self.verified,
            lossy=self._lossy,
            filled=tuple(
                tuple([s is ReadStatus.HIT and i * groups + g in there for g in range(groups)])
                for i, s in enumerate(self.status)
            ),
        )

    @property
    def blocks(self) -> Blocks:
        """One a key, None for a miss; private. Arrays of one get share one allocation. Nothing where buffers were given."""
        if not isinstance(self._blocks, tuple):
            self._blocks = self._blocks()
        return self._blocks

    @property
    def lossy(self) -> tuple[bool, ...]:
        """One a key: whether the block is near what was put and not equal, as the namespace and the operator allow."""
        return tuple(map(bool, self._lossy or bytes(len(self.status))))

    @property
    def hits(self) -> int:
        return self.status.count(ReadStatus.HIT)

    @property
    def prefix_hits(self) -> int:
        """Blocks before the first miss: what an engine can use of one path."""
        return next(
            (i for i, s in enumerate(self.status) if s is not ReadStatus.HIT), len(self.status)
        )


@dataclass(frozen=True, slots=True)
class Located:
    """One a key: bit t of `tiers` is set where tier t holds it, bit 7 where it is readable over tiers; generation 0 where absent."""

    tiers: tuple[int, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pinned:
    pin: int
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class AccessReport:
    """`taken` False: shed, over the daemon's rate. `blocks` were there; `raised` of them count as used, `wanted` of those come up from NVMe."""

    taken: bool
    blocks: int
    raised: int
    wanted: int


@dataclass(frozen=True, slots=True)
class Job:
    """A prefetch; `blocks` is what it has to load."""

    job: int
    blocks: int


@dataclass(frozen=True, slots=True)
class OpenedNamespace:
    """What the daemon made of a specification: defaults are filled in."""

    digest: bytes
    spec: NamespaceSpec
    created: bool


@dataclass(slots=True)
class OptimisticReads:
    """Keys, by what became of them; `untold`: hits that the daemon did not hear of. Counted without a lock: near enough."""

    hits: int = 0
    absent: int = 0
    """Not in the projection: not stored, on disk, or of a kind that is always acquired."""
    changed: int = 0
    """The entry was being written, or changed while its bytes were copied."""
    mismatched: int = 0
    """The copied bytes had another checksum."""
    untold: int = 0
