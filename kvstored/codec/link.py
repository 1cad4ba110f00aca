"""Whether bytes travel faster as frames: what a link carries beside what cores encode and decode. Pure arithmetic; times are told."""

from dataclasses import dataclass

GAIN_MIN = 1.1
"""Frames take CPU of both ends: they have to be faster by a tenth."""
MEASURED_BYTES_MIN = 1 << 20
"""Of a transfer that says something of its link: less is over before it has begun."""
AGAIN = 64
"""Transfers as frames after which one goes plain, to see what the link carries now."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Of one group, from a sample: how many times fewer bytes, and what a core encodes and decodes of plain bytes a second."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float


def is_faster(gain: Gain, link_bytes_per_s: float, encoders: int, decoders: int) -> bool:
    """Encoding, the link and decoding work beside each other: the slowest of them sets the pace."""
    pace = min(
        link_bytes_per_s * gain.ratio,
        gain.encode_bytes_per_s * encoders,
        gain.decode_bytes_per_s * decoders,
    )
    return pace >= GAIN_MIN * link_bytes_per_s


class Link:
    """One direction of a connection as its client sees it. `given_bytes_per_s`: as the operator says; 0: learned from transfers of plain bytes,
    of which the first goes plain for that, and now and then another one. What frames take says little of a link: it may wait for their encoder.
    """

    def __init__(self, given_bytes_per_s: float = 0.0) -> None:
        self._given = given_bytes_per_s
        self._measured = 0.0
        self._framed = 0

    @property
    def bytes_per_s(self) -> float:
        """0 where nothing is known yet, or it is to be measured anew."""
        if self._given:
            return self._given
        return 0.0 if self._framed >= AGAIN else self._measured

    def carried(self, plain_bytes: int, took_s: float) -> None:
        """A transfer of plain bytes, until the last one was there."""
        self._framed = 0
        if plain_bytes >= MEASURED_BYTES_MIN and took_s > 0:
            found = plain_bytes / took_s
            self._measured = (self._measured + found) / 2 if self._measured else found

    def framed(self) -> None:
        """A transfer as frames."""
        self._framed += 1
