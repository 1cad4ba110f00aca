"""Fingerprint to block row: one open-addressed hash table for all namespaces and tiers.

It holds 128-bit fingerprints only. Two keys with one fingerprint are told apart by whoever reads
the full key beside the bytes, not here. Nothing here knows what a row means.

The table holds row numbers; a slot's fingerprint is looked up in the `fingerprints` column. Linear
probing with backward-shift deletion: no tombstones, so lookups do not slow down with churn.
"""

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import Fingerprints, Rows

_SLOTS_MIN = 64
_SCALAR_MAX = 16
"""Below so many keys a Python loop over memory views beats another round of array calls."""
_FEW = 8
"""So few keys are looked up one by one."""
_ROUNDS_MAX = 64
"""Array rounds before the rest goes one by one, so that equal home slots do not cost n rounds."""


class FingerprintIndex:
    """16 bytes a row and 8 to 16 bytes of slots an entry. Growing rehashes all (70 ms at half a
    million entries): give `rows` where the size is known.
    """

    def __init__(self, rows: int = 0) -> None:
        self._count = 0
        self._allocate_fingerprints(np.zeros((max(rows, _SLOTS_MIN), 2), dtype=np.uint64))
        self._allocate_slots(_slots_for(rows))

    def __len__(self) -> int:
        return self._count

    @property
    def fingerprints(self) -> Fingerprints:
        """Column (capacity, 2) by row; meaningless at rows that are not in the index.

        Read only, and not to be kept: growing replaces it.
        """
        return self._fingerprints

    def find(self, fingerprints: Fingerprints) -> Rows:
        """Row of each fingerprint, -1 where there is none; 4,096 keys in about 0.2 ms."""
        if len(fingerprints) <= _FEW:
            found = [self.find_one((low, high)) for low, high in fingerprints.tolist()]
            return np.asarray(found, dtype=np.int32)
        low = np.ascontiguousarray(fingerprints[:, 0])
        high = np.ascontiguousarray(fingerprints[:, 1])
        slot = (low >> self._shift_u64).astype(np.int64)
        rows = self._slots[slot]
        pending = np.flatnonzero(self._is_other(rows, low, high))
        rounds = 0
        while len(pending) > _SCALAR_MAX and rounds < _ROUNDS_MAX:
            rounds += 1
            at = (slot[pending] + rounds) & self._mask
            found = self._slots[at]
            rows[pending] = found
            pending = pending[self._is_other(found, low[pending], high[pending])]
        for i in pending.tolist():
            rows[i] = self.find_one((int(low[i]), int(high[i])))
        return rows

    def find_one(self, fingerprint: tuple[int, int]) -> int:
        """Row of this fingerprint, or -1."""
        low, high = fingerprint
        slots, words, mask = self._slot_view, self._word_view, self._mask
        slot = low >> self._shift
        while (row := slots[slot]) >= 0:
            if words[2 * row] == low and words[2 * row + 1] == high:
                return row
            slot = (slot + 1) & mask
        return -1

    def put(self, row: int, low: int, high: int) -> None:
        """Neither the row nor the fingerprint may be in the index."""
        self._reserve(self._count + 1, row + 1)
        slots, words, mask = self._slot_view, self._word_view, self._mask
        slot = low >> self._shift
        while (other := slots[slot]) >= 0:
            assert other != row, "row is in the index"
            assert words[2 * other] != low or words[2 * other + 1] != high, "fingerprint is there"
            slot = (slot + 1) & mask
        slots[slot] = row
        words[2 * row] = low
        words[2 * row + 1] = high
        self._count += 1

    def put_many(self, rows: Rows, fingerprints: Fingerprints) -> None:
        """As `put` for each; no row or fingerprint may occur twice or be in the index."""
        if not len(rows):
            return
        self._reserve(self._count + len(rows), int(rows.max()) + 1)
        self._fingerprints[rows] = fingerprints
        self._count += len(rows)
        slot = (fingerprints[:, 0] >> self._shift_u64).astype(np.int64)
        pending = np.asarray(rows, dtype=np.int32)
        for _ in range(_ROUNDS_MAX):
            if len(pending) <= _SCALAR_MAX:
                break
            free = self._slots[slot] < 0
            self._slots[slot[free]] = pending[free]  # of several writers of one slot one wins
            lost = self._slots[slot] != pending
            pending = pending[lost]
            slot = (slot[lost] + 1) & self._mask
        slots, mask = self._slot_view, self._mask
        for row, first in zip(pending.tolist(), slot.tolist(), strict=True):
            at = first
            while slots[at] >= 0:
                at = (at + 1) & mask
            slots[at] = row

    def reserve(self, rows: int) -> None:
        """Room for so many rows in all."""
        if rows > len(self._fingerprints):
            grown = np.zeros((rows, 2), dtype=np.uint64)
            grown[: len(self._fingerprints)] = self._fingerprints
            self._allocate_fingerprints(grown)
        self._reserve(max(rows, self._count), 0)

    def pop(self, row: int) -> None:
        """Forget a row that is in the index."""
        slots, words, mask, shift = self._slot_view, self._word_view, self._mask, self._shift
        hole = words[2 * row] >> shift
        while (other := slots[hole]) != row:
            assert other >= 0, "row is not in the index"
            hole = (hole + 1) & mask
        at = (hole + 1) & mask
        while (other := slots[at]) >= 0:
            # Shift back whatever may not be reached any more once the hole is empty.
            if (at - (words[2 * other] >> shift)) & mask >= (at - hole) & mask:
                slots[hole] = other
                hole = at
            at = (at + 1) & mask
        slots[hole] = -1
        self._count -= 1

    def pop_many(self, rows: Rows) -> None:
        for row in rows.tolist():
            self.pop(row)

    def check(self) -> None:
        """Assert every invariant; cost is linear in the table."""
        taken = np.flatnonzero(self._slots >= 0)
        rows = self._slots[taken]
        assert len(rows) == self._count == len(np.unique(rows))
        assert 2 * self._count <= len(self._slots)
        assert np.array_equal(self.find(self._fingerprints[rows]), rows)

    def _is_other(
        self, rows: Rows, low: NDArray[np.uint64], high: NDArray[np.uint64]
    ) -> NDArray[np.bool_]:
        """Where a slot holds a row with another fingerprint, so that the probe goes on."""
        there = self._fingerprints.take(rows, axis=0, mode="wrap")
        differs = (there[:, 0] != low) | (there[:, 1] != high)
        is_other: NDArray[np.bool_] = differs & (rows >= 0)
        return is_other

    def _reserve(self, count: int, rows: int) -> None:
        if rows > len(self._fingerprints):
            capacity = max(rows, len(self._fingerprints) * 9 // 8)
            grown = np.zeros((capacity, 2), dtype=np.uint64)
            grown[: len(self._fingerprints)] = self._fingerprints
            self._allocate_fingerprints(grown)
        if 2 * count > len(self._slots):
            rows_there = self._slots[self._slots >= 0]
            self._allocate_slots(_slots_for(count))
            self._lay_out(rows_there)

    def _lay_out(self, rows: Rows) -> None:
        """Fill the empty table in one pass, whatever the distribution: sorted by home slot, each
        row lies at its home or right after the one before.
        """
        home = (self._fingerprints[rows, 0] >> self._shift_u64).astype(np.int64)
        order = np.argsort(home)
        home = home[order]
        slot = _after_each_other(home)
        over = int(np.count_nonzero(slot >= len(self._slots)))
        if over:  # the probe wraps around: the last ones come first, as if their home were slot 0
            order, home = np.roll(order, over), np.roll(home, over)
            home[:over] = 0
            slot = _after_each_other(home)
        self._slots[slot] = rows[order]

    def _allocate_fingerprints(self, column: Fingerprints) -> None:
        self._fingerprints = column
        self._word_view = column.reshape(-1).data

    def _allocate_slots(self, slots: int) -> None:
        self._slots: Rows = np.full(slots, -1, dtype=np.int32)
        self._slot_view = self._slots.data
        self._mask = slots - 1
        self._shift = 64 - (slots.bit_length() - 1)
        self._shift_u64 = np.uint64(self._shift)


def _slots_for(count: int) -> int:
    return max(_SLOTS_MIN, 1 << (2 * count - 1).bit_length()) if count else _SLOTS_MIN


def _after_each_other(home: NDArray[np.int64]) -> NDArray[np.int64]:
    place = np.arange(len(home), dtype=np.int64)
    slots: NDArray[np.int64] = np.maximum.accumulate(home - place) + place
    return slots
