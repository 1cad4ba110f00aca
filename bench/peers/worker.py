"""One client of one contestant, in a process of its own and in the contestant's environment.

Reads one JSON command a line on standard input and answers one JSON object a line on what was standard output; libraries that print
are sent to standard error. Only commands and times travel: the bytes are made here from a seed, stamped with the put that they belong
to, and compared here. Started as `python -m bench.peers.worker`.
"""

import importlib
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bench.peers.adapters.base import STORED, Bytes, Store

ALIGNMENT = 4096
READ_BYTES = 1 << 20
CHECKED_BYTES_MAX = 128 << 20


def main() -> None:
    commands, answers = _channel()
    session = Session()
    for line in commands:
        command = json.loads(line)
        do = command.pop("do")
        try:
            answer = session.answer(do, command)
        except Exception as error:  # noqa: BLE001 - a peer's failure is a result of this cell
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if do == "close":
            return


class Session:
    """The commands by name, and what they share."""

    def __init__(self) -> None:
        self._store: Store | None = None
        self._cells: dict[str, Cell] = {}
        self._index = 0

    # Any: JSON objects, read and written at this border only
    def answer(self, do: str, fields: dict[str, Any]) -> dict[str, Any]:
        known: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self.open,
            "leave": self.leave,
            "begin": self.begin,
            "fill": self.fill,
            "drop": self.drop,
            "warm_up": self.warm_up,
            "sample": self.sample,
            "check": self.check,
            "end": self.end,
            "close": self.close,
        }
        return known[do](**fields)

    def open(self, module: str, way: str, address: dict[str, str], index: int) -> dict[str, Any]:
        made = importlib.import_module(module).connect(way, address, index)
        assert isinstance(made, Store), "an adapter connects a Store"
        self._store, self._index = made, index
        for cell in self._cells.values():
            cell.store = made
            if isinstance(cell.beside, DirectFile) and STORED in address:
                cell.beside.read_instead(address[STORED])
        return {}

    def leave(self) -> dict[str, Any]:
        """Between `open` and `open`: the server may be stopped meanwhile."""
        if self._store is not None:
            self._store.close()
        self._store = None
        return {}

    def begin(
        self, name: str, block_bytes: int, blocks: int, sets: int, seed: int, beside: str
    ) -> dict[str, Any]:
        assert self._store is not None, "open comes first"
        self._cells[name] = Cell(self._store, block_bytes, blocks, sets, seed, beside, self._index)
        return {}

    def fill(self, name: str) -> dict[str, Any]:
        self._cells[name].fill()
        return {}

    def drop(self, name: str) -> dict[str, Any]:
        self._cells[name].drop()
        return {}

    def warm_up(self, name: str, size_bytes: int, budget_s: float) -> dict[str, Any]:
        self._cells[name].warm_up(size_bytes, budget_s)
        return {}

    def sample(
        self, name: str, what: str, start_at: float, budget_s: float, least: int, most: int
    ) -> dict[str, Any]:
        cell = self._cells[name]
        step: Callable[[], float] = {
            "put": cell.put,
            "get": cell.get,
            "beside put": cell.beside_in,
            "beside get": cell.beside_out,
        }[what]
        time.sleep(max(0.0, start_at - time.monotonic()))
        taken: list[float] = []
        begun = time.monotonic()
        until = begun + budget_s
        while len(taken) < least or (len(taken) < most and time.monotonic() < until):
            taken.append(step())
        if what == "put":
            taken = cell.settled(taken)
        # between puts keys are made and blocks stamped, which is no store's time
        wall_s = sum(taken) if what == "put" else time.monotonic() - begun
        return {"times": taken, "wall_s": wall_s}

    def check(self, name: str) -> dict[str, Any]:
        return {"checked": self._cells[name].check()}

    def end(self, name: str) -> dict[str, Any]:
        cell = self._cells.pop(name, None)  # none where it failed to begin
        if cell is not None:
            cell.end()
        return {}

    def close(self) -> dict[str, Any]:
        for cell in self._cells.values():
            cell.beside.close()
        if self._store is not None:
            self._store.close()
        return {}


class Cell:
    """Buffers and keys of one shape: `sets` batches stored, read and replaced in turns."""

    def __init__(
        self,
        store: Store,
        block_bytes: int,
        blocks: int,
        sets: int,
        seed: int,
        beside: str,
        index: int,
    ) -> None:
        self.store = store
        self._random = np.random.default_rng(seed)
        self._sources = store.buffers(blocks, block_bytes)
        self._targets = store.buffers(blocks, block_bytes)
        for target in self._targets:
            target[:] = 1  # no page of it is touched for the first time in a get
        for source in self._sources:
            source[:] = self._random.integers(0, 256, block_bytes, dtype=np.uint8)
        self._plain = Plain(block_bytes, blocks)
        self.beside: Beside = (
            Ring(block_bytes, blocks, sets)
            if beside == "copy"
            else DirectFile(block_bytes * blocks, sets, index)
        )
        self._keys: list[list[bytes]] = [[] for _ in range(sets)]
        self._stamps = [0] * sets
        self._puts = self._gets = self._besides = 0

    def fill(self) -> None:
        for _ in self._keys:
            self.put()
        self.store.settle()

    def drop(self) -> None:
        """Forgets all sets, so that the puts that follow need not."""
        for at, keys in enumerate(self._keys):
            if keys:
                self.store.clear(keys)
            self._keys[at] = []

    def warm_up(self, size_bytes: int, budget_s: float) -> None:
        """Puts and gets through that many bytes: what is touched for the first time is touched now."""
        batch_bytes = sum(source.nbytes for source in self._sources)
        until = time.monotonic() + budget_s
        done = 0
        while done < size_bytes and time.monotonic() < until:
            self.put()
            self.store.settle()
            self.get_set((self._puts - 1) % len(self._keys))
            done += batch_bytes
        for _ in range(len(self._keys)):
            self.beside_in()
            self.beside_out()

    def put(self) -> float:
        """Only the put is timed: a set that it replaces is forgotten before."""
        at = self._puts % len(self._keys)
        if self._keys[at]:
            self.store.clear(self._keys[at])
        keys = [self._random.bytes(32) for _ in self._sources]
        self._puts += 1
        _stamp(self._sources, self._puts)
        begun = time.perf_counter()
        self.store.put(keys, self._sources)
        taken = time.perf_counter() - begun
        self._keys[at], self._stamps[at] = keys, self._puts
        return taken

    def settled(self, taken: list[float]) -> list[float]:
        """Where puts return before they are stored, each has its share of all the time until they are."""
        begun = time.perf_counter()
        if not self.store.settle():
            return taken
        whole_s = sum(taken) + time.perf_counter() - begun
        return [whole_s / len(taken)] * len(taken)

    def get(self) -> float:
        self._gets += 1
        return self.get_set(self._gets % len(self._keys))

    def get_set(self, at: int) -> float:
        begun = time.perf_counter()
        self.store.get(self._keys[at], self._targets)
        return time.perf_counter() - begun

    def beside_in(self) -> float:
        self._besides += 1
        begun = time.perf_counter()
        self.beside.put(self._besides, self._plain.sources)
        return time.perf_counter() - begun

    def beside_out(self) -> float:
        self._besides += 1
        begun = time.perf_counter()
        self.beside.get(self._besides, self._plain.targets)
        return time.perf_counter() - begun

    def check(self) -> int:
        """Bytes compared with what was put; raises where they differ."""
        checked = 0
        for keys, stamp in zip(self._keys, self._stamps, strict=True):
            for target in self._targets:
                target[:] = 0
            self.store.read_back(keys, self._targets)
            _stamp(self._sources, stamp)
            for i, (source, target) in enumerate(zip(self._sources, self._targets, strict=True)):
                if not np.array_equal(source, target):
                    raise ValueError(f"wrong bytes: block={i} of put={stamp}")
                checked += source.nbytes
            if checked >= CHECKED_BYTES_MAX:
                break
        return checked

    def end(self) -> None:
        self.drop()
        self.beside.close()


class Plain:
    """Ordinary private buffers for what is measured beside: a peer's own memory may be special."""

    def __init__(self, block_bytes: int, blocks: int) -> None:
        memory = mmap.mmap(-1, 2 * blocks * block_bytes)
        whole = np.frombuffer(memory, np.uint8).reshape(2, blocks, block_bytes)
        whole[:] = 1
        self.sources: list[Bytes] = list(whole[0])
        self.targets: list[Bytes] = list(whole[1])


class Ring:
    """The copy into and out of shared memory that everything is compared with; one thread."""

    def __init__(self, block_bytes: int, blocks: int, sets: int) -> None:
        descriptor = os.memfd_create("bench-ring")
        size = block_bytes * blocks * sets
        os.posix_fallocate(descriptor, 0, size)
        self._memory = mmap.mmap(descriptor, size)
        os.close(descriptor)
        whole = np.frombuffer(self._memory, np.uint8).reshape(sets, blocks, block_bytes)
        whole[:] = 1
        self._sets: list[list[Bytes]] = [list(each) for each in whole]

    def put(self, turn: int, sources: Sequence[Bytes]) -> None:
        for slot, source in zip(self._sets[turn % len(self._sets)], sources, strict=True):
            np.copyto(slot, source)

    def get(self, turn: int, targets: Sequence[Bytes]) -> None:
        for slot, target in zip(self._sets[turn % len(self._sets)], targets, strict=True):
            np.copyto(target, slot)

    def close(self) -> None:
        """The mapping goes with its arrays."""
        self._sets = []


class DirectFile:
    """An O_DIRECT read (buffered where the filesystem has none, after dropping its pages) of as many bytes, in calls of 1 MiB: what a get from
    disk is compared with. The bytes of the contestant itself where it says where they are, after they were got: a virtual disk
    reads one file at half the speed of another. Else a plain file's."""

    def __init__(self, batch_bytes: int, sets: int, index: int) -> None:
        self._batch_bytes = max(batch_bytes, ALIGNMENT)
        self._sets, self._first = sets, index * sets
        self._file = tempfile.NamedTemporaryFile(prefix="kvstored-bench-", dir=_disk_folder())  # noqa: SIM115
        for _ in range(sets):
            self._file.write(os.urandom(4096) * (self._batch_bytes // 4096))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._descriptor = _direct(self._file.name)
        self._ranges = [(0, self._batch_bytes * sets)]
        self._memory = mmap.mmap(-1, self._batch_bytes)
        np.frombuffer(self._memory, np.uint8)[:] = 1

    def read_instead(self, path: str) -> None:
        """What is written of that file, where it is as much as a batch."""
        descriptor = _direct(path)
        ranges = list(_written(descriptor, self._batch_bytes))
        if not ranges:
            os.close(descriptor)
            return
        os.close(self._descriptor)
        self._descriptor, self._ranges = descriptor, ranges

    def put(self, turn: int, sources: Sequence[Bytes]) -> None:
        raise NotImplementedError("cells from disk only read")

    def get(self, turn: int, targets: Sequence[Bytes]) -> None:
        view = memoryview(self._memory)
        offset = self._offset(self._first + turn % self._sets)
        for at in range(0, self._batch_bytes, READ_BYTES):
            piece = view[at : at + READ_BYTES]
            if os.preadv(self._descriptor, [piece], offset + at) != len(piece):
                raise OSError(f"short read: offset={offset + at}")

    def _offset(self, batch: int) -> int:
        """Of the batch of that number; from the first again where there are fewer."""
        fits = [(end - begin) // self._batch_bytes for begin, end in self._ranges]
        batch %= sum(fits)
        for (begin, _), count in zip(self._ranges, fits, strict=True):
            if batch < count:
                return begin + batch * self._batch_bytes
            batch -= count
        raise AssertionError("batch is one of them")

    def close(self) -> None:
        os.close(self._descriptor)
        self._file.close()


Beside = Ring | DirectFile


def _stamp(blocks: Sequence[Bytes], put: int) -> None:
    """Each block says which put it is of, and which of its blocks."""
    for i, block in enumerate(blocks):
        block[:16] = np.array([put, i], np.uint64).view(np.uint8)


def _direct(path: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY)


def _written(descriptor: int, least: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file that were written, of so many bytes at least: others are read without a disk."""
    end = 0
    while True:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # no more
            return
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        begin = -(-begin // ALIGNMENT) * ALIGNMENT
        if end - begin >= least:
            yield begin, end


def _disk_folder() -> Path:
    return Path(os.environ.get("KVSTORED_BENCH_DISK") or tempfile.gettempdir())


def _channel() -> tuple[TextIO, TextIO]:
    """The pipe to the parent; whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return sys.stdin, answers


if __name__ == "__main__":
    main()
