"""Puts into places set aside that were answered, and whose books are not made yet: single blocks without an array each, until they are made together."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored.core.calls import Fingerprint, Reserve
from kvstored.core.columnar import Places
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.plain import Paths
from kvstored.core.types import Extent, Heat, NamespaceId, SessionId


class Single(NamedTuple):
    """A put of one plain, full block of `length` bytes, which lie in a place that was set aside."""

    session: SessionId
    ns: NamespaceId
    length: int
    fingerprint: Fingerprint
    parent: Fingerprint | None
    request_id: bytes = b""
    hint: Hint = NO_HINT


class SingleGrant(NamedTuple):
    """`parent`: None for a root, and where what is above may have no block below."""

    place: Extent
    generation: int
    parent: Fingerprint | None
    depth: int
    heat: Heat


class Planned(NamedTuple):
    """Puts into places set aside, of as many blocks each: these are stored, the books of them are not made yet."""

    puts: Sequence[Reserve | Single]
    paths: Paths
    checksums: NDArray[np.uint64]


class PlannedOne(NamedTuple):
    """The same, of one block."""

    put: Single
    grant: SingleGrant
    checksum: int


def together(planned: Iterable[Planned | PlannedOne]) -> Iterator[Planned]:
    """Single blocks that follow each other in one namespace, at once."""
    ones: list[PlannedOne] = []
    for each in planned:
        if ones and (isinstance(each, Planned) or each.put.ns != ones[0].put.ns):
            yield _of_ones(ones)
            ones = []
        if isinstance(each, PlannedOne):
            ones.append(each)
        else:
            yield each
    if ones:
        yield _of_ones(ones)


def _of_ones(ones: Sequence[PlannedOne]) -> Planned:
    puts, grants, checksums = zip(*ones, strict=True)
    extents = np.array([grant.place for grant in grants], dtype=np.int64)
    paths = Paths(
        np.array([put.fingerprint for put in puts], dtype=np.uint64),
        Places(extents[:, 0], extents[:, 1], extents[:, 2]),
        np.array([grant.generation for grant in grants], dtype=np.uint64),
        lengths=[1] * len(ones),
        parents=[grant.parent for grant in grants],
    )
    return Planned(puts, paths, np.array(checksums, dtype=np.uint64))
