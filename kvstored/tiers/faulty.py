"""A tier that fails on purpose, around any other: full, broken, slow, or lying about the bytes. For tests.

What it does is decided by the `random.Random` given, so the same seed and calls give the same faults.
"""

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstored.core.types import Place
from kvstored.errors import Corrupt, KvstoredError, NoSpace, Unavailable
from kvstored.tiers import views as memory
from kvstored.tiers.base import (
    Carried,
    PieceRef,
    PieceRun,
    ScanBatch,
    Tier,
    Views,
    read_each,
    write_each,
)
from kvstored.tiers.record import Record, Records


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely each fault befalls an item (0 to 1); `delay_s_max` bounds the wait before each call."""

    no_space: float = 0.0
    write_error: float = 0.0
    read_error: float = 0.0
    bit_flip: float = 0.0
    delay_s_max: float = 0.0


class FaultyTier:
    """`sleep`: how a call waits (time.sleep in a lane, nothing in a test of order). `faults` may be exchanged at any time."""

    def __init__(
        self, tier: Tier, faults: Faults, rng: random.Random, sleep: Callable[[float], None]
    ) -> None:
        self._tier = tier
        self.faults = faults
        self._rng = rng
        self._sleep = sleep
        self._lock = threading.Lock()  # a lane has several threads, a Random one user

    def write(self, items: Sequence[tuple[Record, Views]]) -> list[Record | KvstoredError]:
        self._wait()
        errors = [self._write_error() for _ in items]
        sound = [item for item, error in zip(items, errors, strict=True) if error is None]
        return _merged(errors, self._tier.write(sound))

    def read(self, items: Sequence[tuple[PieceRef, Place, Views]]) -> list[Record | KvstoredError]:
        self._wait()
        errors = [self._read_error() for _ in items]
        sound = [item for item, error in zip(items, errors, strict=True) if error is None]
        outcomes = self._tier.read(sound)
        for i, (outcome, (_, _, target)) in enumerate(zip(outcomes, sound, strict=True)):
            if isinstance(outcome, Record) and self._draw(self.faults.bit_flip):
                outcomes[i] = self._flipped(outcome, target)
        return _merged(errors, outcomes)

    def write_run(self, run: PieceRun, records: Records) -> Carried:
        return write_each(self, run, records)

    def read_run(self, run: PieceRun) -> Carried:
        return read_each(self, run)

    def discard(self, items: Sequence[tuple[PieceRef, Place]]) -> list[Record | None]:
        self._wait()
        return self._tier.discard(items)

    def scan(self, cursor: int, limit: int) -> ScanBatch:
        self._wait()
        return self._tier.scan(cursor, limit)

    def close(self) -> None:
        self._tier.close()

    def _flipped(self, record: Record, target: Views) -> Record | KvstoredError:
        """Flip one bit as a bad disk would, then check as every tier does: it must come out as Corrupt."""
        with self._lock:
            view = self._rng.choice([view for view in target if len(view)])
            view[self._rng.randrange(len(view))] ^= 1 << self._rng.randrange(8)
        if memory.hash_of(target) == record.checksum:
            return record
        return Corrupt("bytes do not match their checksum: injected bit flip")

    def _write_error(self) -> KvstoredError | None:
        if self._draw(self.faults.no_space):
            return NoSpace("no space left on device: injected")
        if self._draw(self.faults.write_error):
            return Unavailable("input/output error on write: injected")
        return None

    def _read_error(self) -> KvstoredError | None:
        if self._draw(self.faults.read_error):
            return Unavailable("input/output error on read: injected")
        return None

    def _draw(self, probability: float) -> bool:
        with self._lock:
            return self._rng.random() < probability

    def _wait(self) -> None:
        with self._lock:
            delay_s = self._rng.uniform(0.0, self.faults.delay_s_max)
        if delay_s:
            self._sleep(delay_s)


def _merged(
    errors: Sequence[KvstoredError | None], outcomes: list[Record | KvstoredError]
) -> list[Record | KvstoredError]:
    """The outcomes of the items that had no injected error, put back in their places."""
    following = iter(outcomes)
    return [next(following) if error is None else error for error in errors]
