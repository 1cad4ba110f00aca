"""Blocks on NVMe that are stored as what they differ by from another one (P frames), and the extents that they need for that.

Which blocks may refer to which is told by content keys: the same tokens at the same position behind another prefix. The first one that
is written stands alone (an I frame); later ones refer to it, never to one that refers itself. A reference is to an extent, not to a
copy: an I frame that is forgotten leaves its extent, as long as anything refers to it, and the extent counts as used. Its key is worth
more than that of another copy, since evicting it frees nothing: it leaves only where nothing else can, and is as warm as what refers to it (`frame_classes`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvstored.core.types import Heat, NamespaceSpec, Place

SMALLEST_BYTES = 64 << 10
"""Of a piece that is coded: a frame costs a quarter of a millisecond beside its bytes, and smaller pieces move by the thousand as runs."""


def is_coded(spec: NamespaceSpec) -> bool:
    """Whether a namespace has pieces that are large enough for frames, so that its blocks may refer to each other."""
    return any(g.is_required and g.bytes_per_block >= SMALLEST_BYTES for g in spec.groups)


Head = tuple[int, int]
"""Segment and first unit: which extent, and whose."""
Content = tuple[int, int]
"""Content fingerprint, salted by the namespace and so by the tenant, and part."""
NOBODY = -1


@dataclass(slots=True)
class _Base:
    """An extent that others refer to. `owner`: the copy that it is still part of."""

    place: Place
    owner: int
    referring: int = 0


class Frames:
    """Of the NVMe tier. `orphaned_units`: of extents that are kept for what refers to them alone. `lossy`: copies, in memory too, whose bytes are
    near what was put and not equal."""

    def __init__(self) -> None:
        self.lossy: set[int] = set()
        self.orphaned_units = 0
        self._bases: dict[Head, _Base] = {}
        self._base_of: dict[Head, Head] = {}
        self._owned: Counter[int] = Counter()
        self._anchors: dict[Content, int] = {}
        self._coming: dict[Content, int] = {}
        self._contents: dict[int, Content] = {}
        self._loose: list[int] = []
        self._warmth: dict[int, Heat] = {}

    def __len__(self) -> int:
        """Pieces that refer to another one."""
        return len(self._base_of)

    # ---- who stands for a content

    def anchor(self, content: Content) -> int:
        """The copy that stands alone for this content, or NOBODY."""
        return self._anchors.get(content, NOBODY)

    def is_coming(self, content: Content) -> bool:
        """Whether a copy that may become its anchor is being written: the next one is better off waiting."""
        return content in self._coming

    def expect(self, content: Content, copy: int) -> None:
        self._coming[content] = copy

    def settle(self, content: Content, copy: int, *, is_alone: bool) -> None:
        """The copy is written, or will not be; one that `is_alone` is the anchor from now on, where there is none."""
        if self._coming.get(content) == copy:
            del self._coming[content]
        if is_alone and content not in self._anchors:
            self._anchors[content] = copy
            self._contents[copy] = content

    def forget(self, copy: int) -> None:
        """The copy is unlinked from its block: it stands for nothing."""
        self.lossy.discard(copy)
        content = self._contents.pop(copy, None)
        if content is not None:
            del self._anchors[content]

    # ---- references

    def refer(self, place: Place, base: Place, owner: int) -> None:
        """What lies at `place` refers to `base`, which is part of the copy `owner`."""
        kept = self._bases.get(_head(base))
        if kept is None:
            kept = self._bases[_head(base)] = _Base(base, owner)
            self._count(owner, 1)
        assert kept.place == base, "an extent has one length"
        kept.referring += 1
        self._base_of[_head(place)] = _head(base)

    def release(self, place: Place) -> Place | None:
        """What lies at `place` refers to nothing any more; the extent that nobody needs any longer, if that is one."""
        base = self._base_of.pop(_head(place), None)
        if base is None:
            return None
        kept = self._bases[base]
        kept.referring -= 1
        if kept.referring:
            return None
        del self._bases[base]
        if kept.owner != NOBODY:
            self._count(kept.owner, -1)
            self._loose.append(kept.owner)
            return None
        self.orphaned_units -= _units(kept.place)
        return kept.place

    def leaving(self, places: Iterable[Place]) -> Iterator[Place]:
        """Of places that their copies give up those that may be granted again, and extents that were kept for them."""
        for place in places:
            kept = self._bases.get(_head(place))
            if kept is not None:
                self._count(kept.owner, -1)
                kept.owner = NOBODY
                self.orphaned_units += _units(kept.place)
                continue
            needless = self.release(place)
            yield place
            if needless is not None:
                yield needless

    def refers(self, place: Place) -> bool:
        return _head(place) in self._base_of

    def is_referred_to(self, copy: int) -> bool:
        return copy in self._owned

    @property
    def referred_to(self) -> list[int]:
        """Copies of which something is referred to."""
        return list(self._owned)

    def owner_of_base(self, head: Head) -> int:
        """The copy that what lies there refers to; NOBODY where it refers to nothing, or to what is no part of a copy any more."""
        base = self._base_of.get(head)
        return NOBODY if base is None else self._bases[base].owner

    def warm(self, copy: int, heat: Heat) -> None:
        """Something of this class refers to the copy."""
        self._warmth[copy] = min(heat, self._warmth.get(copy, heat))

    def warmth(self, copy: int, otherwise: Heat) -> Heat:
        """The warmest class of what refers to it, as long as anything does."""
        return self._warmth.get(copy, otherwise)

    def loosened(self) -> list[int]:
        """Copies that nothing refers to since the last call: they may be evicted like others."""
        loose, self._loose = self._loose, []
        return [copy for copy in loose if copy not in self._owned]

    # ---- after a restart

    def has_base(self, place: Place) -> bool:
        """Whether something refers to this very extent."""
        kept = self._bases.get(_head(place))
        return kept is not None and kept.place == place

    def is_orphan(self, place: Place) -> bool:
        """Whether it is kept for what refers to it, and for nothing else."""
        return self.has_base(place) and self._bases[_head(place)].owner == NOBODY

    def keep(self, place: Place) -> None:
        """An extent that was claimed for a reference, before or without the record of its own."""
        self._bases[_head(place)] = _Base(place, NOBODY)
        self.orphaned_units += _units(place)

    def adopt(self, place: Place, owner: int) -> None:
        """The record of a kept extent was found: it is part of a copy again."""
        kept = self._bases[_head(place)]
        assert kept.owner == NOBODY, "an extent is part of one copy"
        kept.owner = owner
        self._count(owner, 1)
        self.orphaned_units -= _units(place)

    def referring_to(self, bases: Iterable[Place]) -> list[Head]:
        """Where the pieces lie that refer to one of these extents."""
        heads = {_head(base) for base in bases}
        return [head for head, base in self._base_of.items() if base in heads]

    @property
    def bases(self) -> list[Place]:
        return [kept.place for kept in self._bases.values()]

    def check(self) -> None:
        """Asserts that what is counted is as kept: for tests."""
        referring = Counter(self._base_of.values())
        assert {head: kept.referring for head, kept in self._bases.items()} == dict(referring)
        kept = self._bases.values()
        assert self._owned == Counter(base.owner for base in kept if base.owner != NOBODY)
        orphans = (_units(base.place) for base in kept if base.owner == NOBODY)
        assert self.orphaned_units == sum(orphans)
        assert not self._base_of.keys() & self._bases.keys(), "a reference of a reference"
        assert self._warmth.keys() <= self._owned.keys()
        assert self._anchors == {content: copy for copy, content in self._contents.items()}

    def _count(self, owner: int, more: int) -> None:
        if owner == NOBODY:
            return
        self._owned[owner] += more
        if not self._owned[owner]:
            del self._owned[owner]
            self._warmth.pop(owner, None)


def _head(place: Place) -> Head:
    return place[0][0], place[0][1]


def _units(place: Place) -> int:
    return sum(extent.units for extent in place)
