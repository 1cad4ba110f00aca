"""What a link of one host holds between a message and the next: places that were granted, and what carries the bytes."""

from collections.abc import Callable
from dataclasses import dataclass

from kvstored.client.copying import Bytes, Copier, Run
from kvstored.client.links import PutPart
from kvstored.client.runs import runs_between, walks_between
from kvstored.client.scatter import Walk, gather_all
from kvstored.core.calls import FillStatus
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import U8S, U64S, Pieces, unpack_u64

Mapped = Callable[[Pieces, float], dict[int, Bytes]]
"""The segments that pieces lie in, within a time."""


@dataclass(frozen=True, slots=True)
class Acquired:
    """An answer to Acquire, unpacked, its segments mapped."""

    lease: int
    status: U8S
    pieces: Pieces
    checksums: U64S
    must_verify: U8S
    segments: dict[int, Bytes]


@dataclass(frozen=True, slots=True)
class Carriers:
    """What brings the bytes of a part to their places: `runs` or `walks`, of the pieces number `indexes`."""

    indexes: list[int]
    runs: list[Run]
    walks: list[Walk]

    def copy_in(self, copier: Copier) -> list[int]:
        """The checksum of each piece."""
        if self.runs:
            return copier.copy_in(self.runs)
        return gather_all(self.walks, copier)


def carriers_of(part: PutPart, pieces: Pieces, segments: dict[int, Bytes]) -> Carriers:
    if part.gathers:
        indexes, walks = walks_between(pieces, part.gathers, segments, None)
        return Carriers(indexes, [], walks)
    indexes, runs = runs_between(pieces, part.sources, segments)
    return Carriers(indexes, runs, [])


@dataclass(frozen=True, slots=True)
class Filling:
    """A reserved part. `granted`: indexes of keys whose `fills` are to be written."""

    status: list[FillStatus]
    granted: list[int]
    fills: U64S
    carriers: Carriers
    checksums: U64S


def granted_fills(reserved: pb.ReserveResponse, keys: int) -> U64S:
    fills = unpack_u64(reserved.fills, "fills", keys)
    granted: U64S = fills[fills != 0]
    return granted
