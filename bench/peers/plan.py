"""What is measured, in which order. Pure.

A *visit* is one contestant at one block size in one round: its server is started, its cells are measured, it is stopped. Within a
round the visits come in shuffled order, within a visit the cells. Every cell measures a shared-memory copy of as many bytes in turns
with the peer, in the same processes, and ratios are to that copy.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1 << 20
BATCH_BYTES_MAX = 256 * MIB
"""Of one batch of all clients together: a larger one has fewer blocks, which the tables say."""
KEPT_BYTES_MAX = 256 * MIB
"""Batches of all clients that are kept and read in turns: where blocks are large, not what a cache holds."""
KEPT_BLOCKS_MAX = 4096
SETS_MIN, SETS_MAX = 3, 256
COLD_BYTES = 128 * MIB
"""What a cell from disk reads, all clients together; each byte once."""
COLD_SETS_MIN, COLD_SETS_MAX = 3, 32
CAPACITY_MIN = 512 * MIB

WARM, COLD = "warm", "disk"
PUT, GET = "put", "get"


@dataclass(frozen=True, slots=True)
class Shape:
    """Size, batch and clients of a cell. `batch` is what was asked for, `blocks` what fits under the cap."""

    block_bytes: int
    batch: int
    clients: int

    @property
    def blocks(self) -> int:
        return max(1, min(self.batch, BATCH_BYTES_MAX // (self.block_bytes * self.clients)))

    @property
    def batch_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def sets(self) -> int:
        fits = KEPT_BYTES_MAX // (self.batch_bytes * self.clients)
        return _within(min(fits, KEPT_BLOCKS_MAX // self.blocks), SETS_MIN, SETS_MAX)

    @property
    def cold_sets(self) -> int:
        fits = COLD_BYTES // (self.batch_bytes * self.clients)
        return _within(fits, COLD_SETS_MIN, COLD_SETS_MAX)

    @property
    def words(self) -> str:
        capped = "" if self.blocks == self.batch else f" (capped: {self.blocks})"
        return f"{size_words(self.block_bytes)} x {self.batch}{capped}"


@dataclass(frozen=True, slots=True)
class Visit:
    round_: int
    contestant: str
    block_bytes: int
    medium: str
    shapes: tuple[Shape, ...]

    @property
    def clients(self) -> int:
        return max(shape.clients for shape in self.shapes)

    @property
    def capacity_bytes(self) -> int:
        """Of warm visits one shape is stored at a time, of cold ones all are; a cache wants room to spare."""
        kept = [
            shape.batch_bytes
            * shape.clients
            * (shape.sets if self.medium == WARM else shape.cold_sets)
            for shape in self.shapes
        ]
        return max(CAPACITY_MIN, 2 * (max(kept) if self.medium == WARM else sum(kept)))


def visits(
    contestants: Sequence[tuple[str, str]],
    sizes: Sequence[int],
    batches: Sequence[int],
    clients: Sequence[int],
    rounds: int,
    seed: int,
) -> list[Visit]:
    """`contestants`: name and medium. In every round all of one size follow each other, so that a comparison is one of few minutes."""
    shuffle = random.Random(seed).shuffle
    made = []
    for round_ in range(rounds):
        turn = list(sizes)
        shuffle(turn)
        for size in turn:
            order = list(contestants)
            shuffle(order)
            for name, medium in order:
                shapes = [Shape(size, batch, count) for batch in batches for count in clients]
                shuffle(shapes)
                made.append(Visit(round_, name, size, medium, tuple(shapes)))
    return made


def size_words(size_bytes: int) -> str:
    for unit, words in ((MIB, "MiB"), (1 << 10, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit} {words}"
    return f"{size_bytes} B"


def _within(value: int, least: int, most: int) -> int:
    return min(max(value, least), most)
