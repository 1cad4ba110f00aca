"""A bounded memory of why blocks are gone, for misses and `explain`."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvstored.core.calls import Fingerprint, Reason
from kvstored.core.types import NamespaceId, TierId


class Forgotten(NamedTuple):
    """The last readable copy left this tier at this time."""

    reason: Reason
    tier: TierId
    at_s: float


class Doomed(NamedTuple):
    """What is left to know of a forgotten copy that is still read or written."""

    ns: NamespaceId
    fingerprint: Fingerprint
    reason: Reason


class History:
    """The youngest `lines_max` lines, one a block."""

    def __init__(self, lines_max: int) -> None:
        self._lines: OrderedDict[Fingerprint, Forgotten] = OrderedDict()
        self._lapsed: OrderedDict[Fingerprint, Forgotten] = OrderedDict()
        self._lines_max = lines_max
        self._is_whole = True

    @property
    def is_full(self) -> bool:
        """Older lines may have been dropped."""
        return len(self._lines) >= self._lines_max

    @property
    def is_whole(self) -> bool:
        """It tells of every block that ever was here: nothing was dropped, and nothing is from before the daemon's start."""
        return self._is_whole and not self.is_full

    def began_late(self) -> None:
        """Space of an earlier run was found: blocks of it may be gone without a line, even all of them."""
        self._is_whole = False

    @property
    def oldest_s(self) -> float:
        return next(iter(self._lines.values())).at_s

    def add(self, fingerprint: Fingerprint, line: Forgotten) -> None:
        self._lines[fingerprint] = line
        self._lines.move_to_end(fingerprint)
        if len(self._lines) > self._lines_max:
            self._lines.popitem(last=False)

    def add_many(self, fingerprints: Sequence[Fingerprint], line: Forgotten) -> None:
        """As `add` for each: a line that is replaced becomes the youngest."""
        lines = self._lines
        for fingerprint in fingerprints:
            lines.pop(fingerprint, None)
            lines[fingerprint] = line
        for _ in range(len(lines) - self._lines_max):
            lines.popitem(last=False)

    def get(self, fingerprint: Fingerprint) -> Forgotten | None:
        return self._lines.get(fingerprint)

    def lapse(self, fingerprint: Fingerprint, line: Forgotten) -> None:
        """Window and state of a block went by their age: the block itself is still there."""
        self._lapsed[fingerprint] = line
        self._lapsed.move_to_end(fingerprint)
        if len(self._lapsed) > self._lines_max:
            self._lapsed.popitem(last=False)

    def lapsed(self, fingerprint: Fingerprint) -> Forgotten | None:
        return self._lapsed.get(fingerprint)
