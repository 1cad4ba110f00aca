"""P and B sections: what an element differs by from the same element of one reference block, or of the mean of two.

The difference is taken of the bit patterns as integers, modulo their width: exact for every value, NaN payloads too, and small where the
values are near. How small depends on the size of the value, so values are brought together by the exponent of the reference, which the decoder
has as well: the section lies as 2^stages lanes, and each stage lets lanes exchange values in pairs so that the one with the lesser exponent comes
first. Lanes of like exponents then share a Huffman code. Every step is one vector operation over the whole section; picking values by index takes
longer for two groups than eight stages take, which part them as well as three groups would.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstored.codec import planes, zigzag
from kvstored.codec.differences import BIAS, ESCAPE, WIDE, predicted, put_near, put_wide, take_words
from kvstored.codec.elements import FORMS, Bytes, Element, Words, exponents_of
from kvstored.codec.streams import Reader, Writer
from kvstored.errors import Corrupt

# These numbers, and how lanes are sorted and grouped, are part of the format: a decoder does the same.
STAGES_MAX = 12
_LANE_MIN = 256
"""Values a lane at least: shorter ones make short vectors."""
_ESCAPES_SHARE = 16
"""More escapes than 1/16 of the values, whose own bits follow whole (they have few exponents, differences any bits), and the upper byte of every
difference is coded instead."""
_NARROW = 0
_PERCENTS = (3, 8, 15, 25, 40, 60, 80)
"""Where, of the lanes in order of their exponents, another Huffman code begins: small values differ most from each other."""
_STEP = 31
"""Every so many values are looked at: odd, or they would be of a few channels."""
_STRETCH = 256 * _STEP
"""Values that are sorted by their exponents alone; layers, heads, K and V differ by more."""
_FINE = 4
_MIDDLE = 160
_NOTHING = np.zeros(0, dtype=np.uint8)
_SAMPLED = 16
"""Lanes are put in order by a sixteenth of their values."""


def encode(
    writer: Writer, words: Words, references: Sequence[Words], element: Element, stages: int
) -> None:
    """In fewer stages where the section is short, in none where nothing differs."""
    reference = predicted(references)
    difference = words - reference
    width = FORMS[element].width_bytes
    if width == 4:
        planes.encode(writer, zigzag.folded(difference))
        return
    taken = min(stages, STAGES_MAX, max((len(words) // _LANE_MIN).bit_length() - 1, 0))
    some = difference[::_STEP].copy()
    if not some.any() and not difference.any():
        taken = 0
    exponents = exponents_of(reference, element)
    offsets = _offsets(some, exponents[::_STEP]) if taken else _NOTHING
    lanes = _Lanes(exponents, taken, offsets)
    writer.add_number(taken)
    writer.add(offsets)
    if width == 1:
        lanes.add(writer, difference.astype(np.uint8))
        return
    symbols, where = _symbols(difference)
    if len(where) * _ESCAPES_SHARE <= len(words):
        writer.add_number(_NARROW)
        lanes.add(writer, symbols)
        writer.add_number(len(where))
        planes.encode(writer, words[where])
        return
    writer.add_number(WIDE)
    folded = zigzag.folded(difference - np.uint16(BIAS))
    lanes.add(writer, (folded >> 8).astype(np.uint8))
    lanes.add(writer, folded.astype(np.uint8))


def decode(reader: Reader, target: Words, references: Sequence[Words], element: Element) -> None:
    reference = predicted(references)
    count = len(target)
    if FORMS[element].width_bytes == 4:
        take_words(reader, target, reference)
        return
    stages = reader.take_number()
    if stages > STAGES_MAX or (stages and count < 1 << stages):
        raise Corrupt(f"section has impossible lanes: {stages=} values={count}")
    offsets = reader.take(-(-count // _STRETCH) if stages else 0)
    lanes = _Lanes(exponents_of(reference, element), stages, offsets)
    if FORMS[element].width_bytes == 1:
        np.add(lanes.take(reader, count), reference, out=target)
        return
    if reader.take_number() == WIDE:
        high = lanes.take(reader, count)
        put_wide(target, reference, high, lanes.take(reader, count))
        return
    symbols = lanes.take(reader, count)
    where, escaped = put_near(reader, target, reference, symbols, reader.take_number())
    target[where] = escaped


def _offsets(differences: Words, exponents: Bytes) -> Bytes:
    """Of each stretch: how far its differences are from what another stretch has at the same exponent, in quarters of a power of two.

    Both are every `_STEP`th of the section's.
    """
    size = np.abs(differences.view(f"<i{differences.dtype.itemsize}").astype(np.float32))
    size += np.float32(0.5)
    far = size.view(np.int32).astype(np.float32)  # near the logarithm, times 2^23
    far += exponents * np.float32(1 << 23)
    begins = np.arange(0, len(far), _STRETCH // _STEP)
    means = np.add.reduceat(far, begins) / np.diff(begins, append=len(far))
    return (_MIDDLE - np.rint(means * (_FINE / (1 << 23)) - 127 * _FINE).astype(np.int64)).astype(
        np.uint8
    )


def _keys(exponents: Bytes, offsets: Bytes) -> Bytes:
    """What values are sorted by, modulo 256: exponents that are 40 below the usual ones, as of zeros, come among others, which costs little."""
    keys = exponents * np.uint8(_FINE)
    full = len(keys) // _STRETCH
    stretches = keys[: full * _STRETCH].reshape(full, _STRETCH)
    np.add(stretches, offsets[:full, None], out=stretches)
    keys[full * _STRETCH :] += offsets[-1]
    return keys


def _symbols(difference: Words) -> tuple[Bytes, NDArray[np.intp]]:
    """One byte for each, and where it is an escape. Leaves `difference` with the bias."""
    np.add(difference, np.uint16(BIAS), out=difference)
    symbols = difference.astype(np.uint8)
    where = np.flatnonzero(difference >= ESCAPE)
    symbols[where] = ESCAPE
    return symbols, where


class _Lanes:
    """The exchanges of one section, a function of the reference alone: both sides make the same. What does not fill the lanes stays behind them."""

    def __init__(self, exponents: Bytes, stages: int, offsets: Bytes) -> None:
        self.stages = stages
        self._whole = len(exponents) >> stages << stages
        # one allocation: many would go back to the kernel with each section, and cost a page fault each 4 KiB
        self._masks = np.empty((stages, self._whole // 2), dtype=np.uint8)
        self._groups: list[NDArray[np.intp]] = []
        if stages:
            keys = _keys(exponents, offsets)[: self._whole]
            self._groups = _grouped(self._sorted(keys).reshape(1 << stages, -1))

    def add(self, writer: Writer, values: Bytes) -> None:
        """A stream for each group, and one for the rest. Takes `values`' memory."""
        if self.stages:
            inside = values[: self._whole]
            _exchange(inside, self._masks, range(self.stages))
            rows = inside.reshape(1 << self.stages, -1)
            for group in self._groups:
                writer.add(rows.take(group, axis=0).reshape(-1))
        writer.add(values[self._whole :] if self.stages else values)

    def take(self, reader: Reader, count: int) -> Bytes:
        if not self.stages:
            return reader.take(count)
        values = np.empty(count, dtype=np.uint8)
        inside = values[: self._whole]
        rows = inside.reshape(1 << self.stages, -1)
        for group in self._groups:
            rows[group] = reader.take(group.size * rows.shape[1]).reshape(group.size, -1)
        values[self._whole :] = reader.take(count - self._whole)
        _exchange(inside, self._masks, reversed(range(self.stages)))
        return values

    def _sorted(self, keys: Bytes) -> Bytes:
        """`keys` after all stages; where values change places is kept. Takes `keys`' memory."""
        other = np.empty_like(keys)
        for stage in range(self.stages):
            pairs, ordered = (each.reshape(1 << stage, 2, -1) for each in (keys, other))
            first, second = pairs[:, 0], pairs[:, 1]
            np.greater(first, second, out=self._masks[stage].view(np.bool_).reshape(first.shape))
            np.minimum(first, second, out=ordered[:, 0])
            np.maximum(first, second, out=ordered[:, 1])
            keys, other = other, keys
        return keys


def _grouped(lanes: NDArray[np.uint8]) -> list[NDArray[np.intp]]:
    """Numbers of lanes of like exponents, the least first."""
    some = lanes[:, : max(lanes.shape[1] // _SAMPLED, 1)]
    total = np.add.reduce(some, axis=1, dtype=np.uint32)
    order = np.argsort(total, kind="stable")
    bounds = [len(order) * percent // 100 for percent in _PERCENTS]
    return [group for group in np.split(order, bounds) if len(group)]


def _exchange(values: Bytes, masks: NDArray[np.uint8], stages: Iterable[int]) -> None:
    """In place: pairs change places where the mask has a one. In the other order of stages it undoes itself."""
    spare = np.empty(len(values) // 2, dtype=np.uint8)
    for stage in stages:
        pairs = values.reshape(1 << stage, 2, -1)
        first, second = pairs[:, 0], pairs[:, 1]
        mask, moved = (each.reshape(first.shape) for each in (masks[stage], spare))
        np.bitwise_xor(first, second, out=moved)
        np.multiply(moved, mask, out=moved)
        np.bitwise_xor(first, moved, out=first)
        np.bitwise_xor(second, moved, out=second)
