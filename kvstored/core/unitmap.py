"""Which units of a tier's segments are taken, a bit each: for claims in any order, thousands at a time.

While a tier recovers nothing is granted in it, so its free runs are not needed before the last claim: here a claim costs a bit per unit,
where an ordered run would be split.
"""

import numpy as np
from numpy.typing import NDArray

from kvstored.core.types import Extent

Mask = NDArray[np.bool_]
_INNER_MAX = 64
"""Extents with more whole bytes than these are looked at one by one."""


class UnitMap:
    """32 KiB a GiB of the tier."""

    def __init__(self) -> None:
        self._bits = np.zeros(0, dtype=np.uint8)
        self._used_bytes = 0
        self._bases = np.zeros(0, dtype=np.int64)
        self._units = np.zeros(0, dtype=np.int64)
        """By segment; 0 units where it is not here."""

    def add(self, segment: int, units: int) -> None:
        """All of it free."""
        if segment >= len(self._units):
            more = np.zeros(max(64, segment + 1 - len(self._units), len(self._units)), np.int64)
            self._bases = np.concatenate((self._bases, more))
            self._units = np.concatenate((self._units, more))
        self._bases[segment], self._units[segment] = 8 * self._used_bytes, units
        self._used_bytes += -(-units // 8)
        if self._used_bytes > len(self._bits):
            bits = np.zeros(2 * self._used_bytes, dtype=np.uint8)
            bits[: len(self._bits)] = self._bits
            self._bits = bits

    def __contains__(self, segment: int) -> bool:
        return segment < len(self._units) and bool(self._units[segment])

    def segments(self) -> list[int]:
        listed: list[int] = np.flatnonzero(self._units).tolist()
        return listed

    def has_many(self, extents: NDArray[np.int64]) -> Mask:
        """Which rows of (segment, start, units) lie within the segments."""
        if not len(self._units):
            return np.zeros(len(extents), dtype=np.bool_)
        segment, start, units = extents.T
        there = (segment >= 0) & (segment < len(self._units)) & (start >= 0) & (units > 0)
        limit = self._units[np.where(there, segment, 0)]
        within: Mask = there & (start + units <= limit)
        return within

    def take_many(self, extents: NDArray[np.int64]) -> Mask:
        """Take each that is free and that no other one of these meets; False for the others."""
        taken = self.has_many(extents)
        rows = np.flatnonzero(taken)
        first = self._bases[extents[rows, 0]] + extents[rows, 1]
        end = first + extents[rows, 2]
        is_free = ~(self._are_busy(first, end) | _meet_each_other(first, end))
        taken[rows] = is_free
        self._set(first[is_free], end[is_free])
        return taken

    def give(self, extent: Extent) -> None:
        first = int(self._bases[extent.segment]) + extent.start
        begin, size = first >> 3, (extent.units + 14) >> 3
        bits = np.unpackbits(self._bits[begin : begin + size], bitorder="little")
        mine = bits[first & 7 : (first & 7) + extent.units]
        assert mine.all(), "units are free already"
        mine[:] = 0
        self._bits[begin : begin + size] = np.packbits(bits, bitorder="little")

    def free_runs(self, segment: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and lengths, by address."""
        begin, units = int(self._bases[segment]) >> 3, int(self._units[segment])
        packed = self._bits[begin : begin + (units + 7) // 8]
        edges = np.ones(units + 2, dtype=np.int8)
        edges[1:-1] = np.unpackbits(packed, count=units, bitorder="little")
        turns = np.flatnonzero(np.diff(edges))
        return turns[::2], turns[1::2] - turns[::2]

    def drop(self, segment: int) -> None:
        """Its room in the map stays until the map goes."""
        self._units[segment] = 0

    def _are_busy(self, first: NDArray[np.int64], end: NDArray[np.int64]) -> Mask:
        head, tail, heads, tails = _outer(first, end)
        busy: Mask = (self._bits[head] & heads | self._bits[tail] & tails) != 0
        owner, inner = _inner(head, tail)
        busy[owner[self._bits[inner] != 0]] = True
        for i in np.flatnonzero(tail - head > _INNER_MAX).tolist():
            busy[i] |= self._bits[head[i] + 1 : tail[i]].any()
        return busy

    def _set(self, first: NDArray[np.int64], end: NDArray[np.int64]) -> None:
        head, tail, heads, tails = _outer(first, end)
        np.bitwise_or.at(self._bits, head, heads)
        np.bitwise_or.at(self._bits, tail, tails)
        self._bits[_inner(head, tail)[1]] = 0xFF
        for i in np.flatnonzero(tail - head > _INNER_MAX).tolist():
            self._bits[head[i] + 1 : tail[i]] = 0xFF


def _outer(
    first: NDArray[np.int64], end: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], NDArray[np.uint8]]:
    """The bytes in which each begins and ends, and its bits there."""
    head, tail = first >> 3, (end - 1) >> 3
    heads, tails = 0xFF << (first & 7) & 0xFF, 0xFF >> (7 - ((end - 1) & 7))
    both = np.where(head == tail, heads & tails, heads)
    return head, tail, both.astype(np.uint8), np.where(head == tail, both, tails).astype(np.uint8)


def _inner(
    head: NDArray[np.int64], tail: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The whole bytes between, and whose they are; without those of long extents."""
    counts = np.maximum(tail - head - 1, 0)
    counts[tail - head > _INNER_MAX] = 0
    owner = np.repeat(np.arange(len(head)), counts)
    return owner, np.arange(len(owner)) + (head + 1 - (np.cumsum(counts) - counts))[owner]


def _meet_each_other(first: NDArray[np.int64], end: NDArray[np.int64]) -> Mask:
    meet = np.zeros(len(first), dtype=np.bool_)
    order = np.lexsort((end, first))
    begins_within = first[order][1:] < np.maximum.accumulate(end[order])[:-1]
    meet[order[1:][begins_within]] = True
    meet[order[:-1][begins_within]] = True
    return meet
