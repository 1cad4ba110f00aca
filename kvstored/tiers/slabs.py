"""Slab files: where the bytes of the disk tier lie. Whole aligned units in, whole aligned units out, and when they are durable.

Reads and writes go around the page cache (O_DIRECT) where the filesystem can, else through it. What lies where is for others to know.
"""

import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstored.core.columnar import Places
from kvstored.core.types import UNIT_BYTES, Extent, Place
from kvstored.errors import InvalidArgument, NoSpace, Unavailable
from kvstored.tiers import views as memory
from kvstored.tiers.base import Views

_NAME = re.compile(r"slab-(\d{5})\.dat")
_CALL_BYTES_MAX = 1 << 20
"""Of one system call: beyond it none is faster, checking begins later, and of several threads in calls of 4 MiB some devices leave two waiting until
all others are served (DESIGN 25). In units at most 256 buffers (IOV_MAX is 1,024)."""
BRIDGE_BYTES = 64 << 10
"""What lies between two pieces is read along, and left, where it is no more: it takes no longer than another call. Blocks that were made smaller by
the codec lie so. Of all that is read it is at most half."""

Move = Callable[[int, Sequence[memoryview], int], int]
"""A system call: descriptor, buffers, offset; what it moved."""


class SlabIo:
    """The system calls of a slab; tests pass one that fails."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        os.posix_fallocate(fd, 0, size_bytes)


@dataclass(frozen=True, slots=True)
class Job:
    """Move `view` (aligned, whole units) to or from byte `offset` of a slab, on behalf of item number `item`."""

    item: int
    segment: int
    offset: int
    view: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Moved:
    """A run that was tried: the item of each of its jobs, and why it failed."""

    items: list[int]
    error: OSError | None


@dataclass(frozen=True, slots=True)
class Staged:
    """Memory for one piece that can be moved as it is: `aligned` covers whole units.

    Where the piece's own views could not be used, `inside` are the parts of `aligned` that stand for `outside`.
    """

    aligned: list[NDArray[np.uint8]]
    inside: list[NDArray[np.uint8]] = field(default_factory=list)
    outside: list[NDArray[np.uint8]] = field(default_factory=list)

    def fill(self) -> None:
        """Before a write: the piece's bytes into the aligned memory."""
        memory.copy(self.outside, self.inside)

    def spill(self) -> None:
        """After a read: the bytes out into the piece's views."""
        memory.copy(self.inside, self.outside)


def staged(piece: Views) -> Staged:
    """Aligned memory for `piece`: its own views, its ragged tail through a unit of its own, or a copy of everything."""
    views = [view for view in piece if len(view)]
    if len(views) == 1 and len(views[0]) % UNIT_BYTES == 0 and _is_aligned(views[0]):
        return Staged(views)  # nearly all are like this, and tiny ones come by the thousand
    ragged = len(views[-1]) % UNIT_BYTES
    inner_whole = all(len(view) % UNIT_BYTES == 0 for view in views[:-1])
    if not (inner_whole and all(_is_aligned(view) for view in views)):
        size = memory.size_of(views)
        buffer = aligned(size)
        return Staged([buffer], [buffer[:size]], views)
    if not ragged:
        return Staged(views)
    body, tail = views[-1][:-ragged], views[-1][-ragged:]
    unit = aligned(UNIT_BYTES)
    return Staged([*views[:-1], *([body] if len(body) else []), unit], [unit[:ragged]], [tail])


def aligned(size_bytes: int) -> NDArray[np.uint8]:
    """Page-aligned memory of whole units, at least `size_bytes`; the last unit is zero, others hold anything.

    The allocator's, which has pages: mapped afresh, every 4 KiB of it cost a fault and its zeroing, 1.2 s of CPU a GB.
    """
    units_bytes = max(1, -(-size_bytes // UNIT_BYTES)) * UNIT_BYTES
    held = np.empty(units_bytes + UNIT_BYTES, dtype=np.uint8)
    begin = -held.ctypes.data % UNIT_BYTES
    whole = held[begin : begin + units_bytes]
    whole[-UNIT_BYTES:] = 0
    return whole


def slab_path(directory: Path, number: int) -> Path:
    return directory / f"slab-{number:05}.dat"


def jobs_of(item: int, views: Sequence[NDArray[np.uint8]], place: Place) -> list[Job]:
    """Lay aligned views onto a place of the same size."""
    if len(views) == len(place) == 1 and len(views[0]) == place[0].units * UNIT_BYTES:
        return [Job(item, place[0].segment, place[0].start * UNIT_BYTES, views[0])]
    jobs: list[Job] = []
    remaining = list(reversed(views))
    for extent in place:
        offset, end = extent.start * UNIT_BYTES, (extent.start + extent.units) * UNIT_BYTES
        while offset < end:
            view = remaining.pop()
            count = min(len(view), end - offset)
            jobs.append(Job(item, extent.segment, offset, view[:count]))
            if count < len(view):
                remaining.append(view[count:])
            offset += count
    assert not remaining, "views and place differ in size"
    return jobs


class Slabs:
    """The slab files of one directory. `direct=False` never tries O_DIRECT."""

    def __init__(self, directory: Path, *, slab_bytes: int, direct: bool, io: SlabIo) -> None:
        if slab_bytes <= 0 or slab_bytes % UNIT_BYTES:
            raise InvalidArgument(f"slab is no multiple of {UNIT_BYTES}: {slab_bytes=}")
        self._directory = directory
        self._slab_bytes = slab_bytes
        self._io = io
        self.is_direct = direct and _can_direct(directory)
        self._flags = os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0)
        self._fds: dict[int, int] = {}
        self._units: dict[int, int] = {}
        self._left = aligned(BRIDGE_BYTES).data
        """Where bytes go that nobody wants, from all threads at once."""
        for path in sorted(directory.iterdir()):
            if path.name.startswith("slab-") and path.suffix == ".new":
                path.unlink()  # a slab whose maker died before it was whole
                continue
            match = _NAME.fullmatch(path.name)
            if match and path.stat().st_size >= UNIT_BYTES:
                self._open(int(match[1]), path)

    def segments(self) -> list[tuple[int, int]]:
        return sorted(self._units.items())

    def holds(self, extent: Extent) -> bool:
        return 0 < extent.units <= self._units.get(extent.segment, 0) - extent.start

    def grow(self) -> tuple[int, int]:
        """One more slab, its space allocated; (segment, units). Raises NoSpace or Unavailable and leaves nothing behind."""
        number = next(n for n in range(10**5) if n not in self._fds)
        path = slab_path(self._directory, number)
        unfinished = path.with_suffix(".new")
        try:
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                self._io.allocate(fd, self._slab_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            unfinished.rename(path)
            sync_directory(self._directory)
            self._open(number, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise translated(error, f"no new slab: bytes={self._slab_bytes}") from error
        return number, self._units[number]

    def read(self, jobs: Sequence[Job]) -> Iterator[Moved]:
        """Do the jobs, run by run in the order of the disk: what a run has read is best used before the next is asked for."""
        return self._move(jobs, self._io.preadv, BRIDGE_BYTES)

    def write(self, jobs: Sequence[Job]) -> dict[int, OSError]:
        """Do the jobs; the items that failed, each with its first error. Durable only after `sync` of the segments."""
        failed: dict[int, OSError] = {}
        for moved in self._move(jobs, self._io.pwritev, 0):
            if moved.error is not None:
                for item in moved.items:
                    failed.setdefault(item, moved.error)
        return failed

    def read_slots(
        self, places: Places, slots: Sequence[NDArray[np.uint8]]
    ) -> Iterator[tuple[list[int], OSError | None]]:
        """As `read` for slots that are as large as their places; yields which were in each run, and why it failed."""
        return self._move_slots(places, slots, self._io.preadv, BRIDGE_BYTES)

    def write_slots(self, places: Places, slots: Sequence[NDArray[np.uint8]]) -> dict[int, OSError]:
        """As `write`."""
        failed: dict[int, OSError] = {}
        for items, error in self._move_slots(places, slots, self._io.pwritev, 0):
            if error is not None:
                failed.update(dict.fromkeys(items, error))
        return failed

    def hold(self, places: Places) -> NDArray[np.bool_]:
        """As `holds` for each."""
        limits = np.zeros(max(self._units, default=0) + 2, dtype=np.int64)
        for segment, units in self._units.items():
            limits[segment] = units
        known = np.minimum(places.segment, len(limits) - 1)
        fits: NDArray[np.bool_] = places.start + places.units <= limits[known]
        return fits & (places.units > 0)

    def sync(self, segments: Iterable[int]) -> dict[int, OSError]:
        """Make what was written to these segments durable; the segments that failed."""
        failed: dict[int, OSError] = {}
        for segment in sorted(segments):
            try:
                self._io.fdatasync(self._fds[segment])
            except OSError as error:
                failed[segment] = error
        return failed

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds = {}

    def _open(self, number: int, path: Path) -> None:
        self._fds[number] = os.open(path, self._flags)
        units = path.stat().st_size // UNIT_BYTES
        self._units = {**self._units, number: units}  # other threads walk it

    def _move(self, jobs: Sequence[Job], move: Move, bridge_bytes: int) -> Iterator[Moved]:
        """What lies between pieces and cannot be read is none of theirs: they are tried again without it."""
        for run in _runs(jobs, bridge_bytes):
            error: OSError | None = None
            views = self._bridged([(job.offset, job.view.data) for job in run])
            is_bridged = len(run) < len(views)
            try:
                self._move_views(run[0].segment, run[0].offset, views, move)
            except OSError as raised:
                error = raised
            if error is not None and is_bridged:
                yield from self._move(run, move, 0)
            else:
                yield Moved([job.item for job in run], error)

    def _move_slots(
        self, places: Places, slots: Sequence[NDArray[np.uint8]], move: Move, bridge_bytes: int
    ) -> Iterator[tuple[list[int], OSError | None]]:
        for items in _slot_runs(places, bridge_bytes):
            error: OSError | None = None
            segment, offsets = int(places.segment[items[0]]), places.start[items] * UNIT_BYTES
            parts = zip(offsets.tolist(), (slots[i].data for i in items), strict=True)
            views = self._bridged(list(parts))
            is_bridged = len(items) < len(views)
            try:
                self._move_views(segment, int(offsets[0]), views, move)
            except OSError as raised:
                error = raised
            if error is not None and is_bridged:
                mine = [slots[i] for i in items]
                for some, why in self._move_slots(places.at(items), mine, move, 0):
                    yield [items[i] for i in some], why
            else:
                yield items, error

    def _bridged(self, parts: Sequence[tuple[int, memoryview]]) -> list[memoryview]:
        """Buffers for one call from the first offset on; what lies between goes where nobody looks."""
        at, views = parts[0][0], list[memoryview]()
        for offset, view in parts:
            if offset > at:
                views.append(self._left[: offset - at])
            views.append(view)
            at = offset + len(view)
        return views

    def _move_views(self, segment: int, offset: int, views: list[memoryview], move: Move) -> None:
        fd = self._fds[segment]
        while views:
            moved = move(fd, _first(views), offset)
            if moved <= 0:
                raise OSError(errno.EIO, "slab is shorter than its records say")
            offset += moved
            views = _rest(views, moved)


def translated(error: OSError, what: str) -> NoSpace | Unavailable:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (NoSpace if full else Unavailable)(f"{what} cause={error}")


def sync_directory(directory: Path) -> None:
    """Make renames and new files in it durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _runs(jobs: Sequence[Job], bridge_bytes: int) -> list[list[Job]]:
    """Jobs that touch each other on the disk, or nearly, together."""
    runs: list[list[Job]] = []
    wanted = left = end = 0
    for job in sorted(jobs, key=lambda job: (job.segment, job.offset)):
        size, gap = len(job.view), job.offset - end
        is_next = bool(runs) and runs[-1][-1].segment == job.segment and 0 <= gap <= bridge_bytes
        is_next &= left + gap <= wanted and wanted + left + gap + size <= _CALL_BYTES_MAX
        if is_next:
            runs[-1].append(job)
            wanted, left = wanted + size, left + gap
        else:
            runs.append([job])
            wanted, left = size, 0
        end = job.offset + size
    return runs


def _slot_runs(places: Places, bridge_bytes: int) -> Iterator[list[int]]:
    """The same for places of one size."""
    if not places.size:
        return
    order = np.lexsort((places.start, places.segment))
    segment, start, units = (column[order] for column in places)
    size = int(units[0])
    gap = start[1:] - start[:-1] - size
    bridge = min(bridge_bytes // UNIT_BYTES, size)  # so no more than half is read in vain
    is_next = (segment[1:] == segment[:-1]) & (gap >= 0) & (gap <= bridge)
    for run in np.split(np.arange(len(order)), np.flatnonzero(~is_next) + 1):
        for part in _parts_of(start[run] - start[run[0]] + size):
            yield order[run[part]].tolist()


def _parts_of(ends: NDArray[np.int64]) -> Iterator[slice]:
    """Stretches of a run of places for one call each; `ends`: in units from the run's begin, the first of which is a place's size."""
    units_max, begin = _CALL_BYTES_MAX // UNIT_BYTES, 0
    while begin < len(ends):
        before = int(ends[begin] - ends[0])
        end = int(np.searchsorted(ends, before + max(units_max, int(ends[0])), side="right"))
        yield slice(begin, end)
        begin = end


def _first(views: list[memoryview]) -> list[memoryview]:
    """As much of the buffers as one call takes: only a buffer that is larger by itself is cut."""
    return views if len(views) > 1 else [views[0][:_CALL_BYTES_MAX]]


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left of the buffers after their first `moved` bytes."""
    for i, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[i + 1 :]]
        moved -= len(view)
    return []


def _is_aligned(view: NDArray[np.uint8]) -> bool:
    address: int = view.__array_interface__["data"][0]
    return address % UNIT_BYTES == 0


def _can_direct(directory: Path) -> bool:
    """Whether this filesystem really writes a unit around the page cache: some accept the flag only at open."""
    probe = directory / "direct.probe"
    try:
        fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        return os.pwritev(fd, [aligned(UNIT_BYTES).data], 0) == UNIT_BYTES
    except OSError:
        return False
    finally:
        os.close(fd)
        probe.unlink()
