"""Carries the catalog's copy tasks between DRAM and NVMe.

A batch of tasks is one call of the tier, in its lane: on the way down that is one group commit. The tier checks the bytes on their way
against the checksum that the writer gave. Books are closed only in the completion callback, on the loop, when the thread has let go
of source and target; who waits, waits for the flight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from kvstored.core.calls import CopyTask, Reason, StoredPiece
from kvstored.core.types import KeyBatch, TierId
from kvstored.errors import Busy, Corrupt, KvstoredError, NoSpace
from kvstored.store.events import EventKind
from kvstored.store.flights import Flights
from kvstored.store.lane import Ended, Urgency
from kvstored.store.shell import Shell, fingerprint_bytes
from kvstored.tiers.base import PieceRef, Tier, ref_of
from kvstored.tiers.record import Record, State

Result = Record | KvstoredError


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much one lane call carries.

    Loads are as long as one system call of the disk: the lane's threads keep several in flight, one decodes while others read, and the
    first bytes are there soon. Write-back is long, because a commit costs the same whatever it holds.
    """

    load_bytes: int = 4 << 20
    load_pieces: int = 256
    store_bytes: int = 128 << 20
    store_pieces: int = 1024


class Mover:
    """`start` never waits and never raises: a task that finds no room in the lane is aborted like one that failed."""

    def __init__(self, shell: Shell, flights: Flights, bounds: Bounds | None = None) -> None:
        self._shell = shell
        self._flights = flights
        self._bounds = bounds or Bounds()
        self._tasks_now = 0
        self._loading: dict[int, bytes] = {}
        """Full key of each load by its target copy: a load that fails has no record to read it from."""

    @property
    def tasks_now(self) -> int:
        """Tasks begun and not ended."""
        return self._tasks_now

    def start(
        self,
        tasks: Sequence[CopyTask],
        urgency: Urgency,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        ended: Callable[[CopyTask, bool], None] = lambda *_: None,
    ) -> None:
        """Carry `tasks`; `ended` is called on the loop for each with whether its copy is there now.

        `is_wanted` is asked in the lane just before a batch begins: a batch that nobody wants any more is aborted untouched.
        """
        for task in tasks:
            self._flights.begin(task.target_copy)
        self._tasks_now += len(tasks)
        for batch in self._batches(tasks):
            self._submit(batch, urgency, is_wanted, ended)

    def load(
        self,
        tasks: Sequence[CopyTask],
        keys: KeyBatch,
        urgency: Urgency,
        *,
        is_wanted: Callable[[], bool] = lambda: True,
        ended: Callable[[CopyTask, bool], None] = lambda *_: None,
    ) -> None:
        """`start` tasks that bring some of `keys` up to DRAM: each ends in a LOADED or a LOAD_FAILED event."""
        wanted = {task.fingerprint for task in tasks}
        names = {
            (low, high): keys.key(i)
            for i, (low, high) in enumerate(keys.fingerprints.tolist() if wanted else ())
            if (low, high) in wanted
        }
        for task in tasks:
            self._loading[task.target_copy] = names[task.fingerprint]
        self.start(tasks, urgency, is_wanted=is_wanted, ended=ended)

    def _submit(
        self,
        batch: list[CopyTask],
        urgency: Urgency,
        is_wanted: Callable[[], bool],
        ended: Callable[[CopyTask, bool], None],
    ) -> None:
        carry = self._load if batch[0].target is TierId.DRAM else self._store

        def work() -> list[Result]:
            if not is_wanted():
                return [Busy("the copy is not wanted any more")] * sum(len(t.moves) for t in batch)
            return carry(batch)

        try:
            running = self._shell.tiers.disk_lane.submit(work, urgency)
        except Busy as error:
            self._land(batch, Ended(None, error), ended)
            return
        shell, begun_s = self._shell, self._shell.elapsed_s()

        def landed(end: Ended[list[Result]]) -> None:
            shell.metrics.copy_seconds[batch[0].target].observe(shell.elapsed_s() - begun_s)
            self._land(batch, end, ended)

        running.when_ended(landed)

    def _load(self, batch: list[CopyTask]) -> list[Result]:
        """In the lane: NVMe -> DRAM, straight into the arena."""
        arena, disk = self._shell.tiers.arena, self._disk()
        return disk.read(
            [
                (
                    PieceRef(fingerprint_bytes(task.fingerprint), move.group, move.shard),
                    move.source,
                    arena.views(move.target, move.length),
                )
                for task in batch
                for move in task.moves
            ]
        )

    def _store(self, batch: list[CopyTask]) -> list[Result]:
        """In the lane: DRAM -> NVMe, one group commit. Of a task that failed in part nothing stays behind."""
        arena, disk = self._shell.tiers.arena, self._disk()
        results = disk.write(
            [
                (
                    replace(
                        arena.record_at(move.source),
                        place=move.target,
                        checksum=move.checksum,
                        hits=task.hits,
                        heat=int(task.heat),
                        generation=task.generation,
                        leased=False,
                        owner_pid=0,
                    ),
                    arena.views(move.source, move.length),
                )
                for task in batch
                for move in task.moves
            ]
        )
        orphans = [
            (ref_of(record), record.place)
            for _, ends in _by_task(batch, results)
            if any(isinstance(end, KvstoredError) for end in ends)
            for record in ends
            if isinstance(record, Record)
        ]
        if orphans:
            disk.discard(orphans)
        return results

    def _land(
        self,
        batch: list[CopyTask],
        end: Ended[list[Result]],
        ended: Callable[[CopyTask, bool], None],
    ) -> None:
        """On the loop, after the thread let go: close the books of each task and tell who waits."""
        if end.error is not None and not isinstance(end.error, KvstoredError):
            self._shell.report("copy failed", end.error)
        for task, results in _results_of(batch, end):
            self._tasks_now -= 1
            is_there = self._close(task, results)
            self._tell_if_failed(task, is_there)
            self._flights.land(task.target_copy)
            ended(task, is_there)

    def _close(self, task: CopyTask, results: Sequence[Result | BaseException]) -> bool:
        shell = self._shell
        faults = [result for result in results if not isinstance(result, Record)]
        records = [result for result in results if isinstance(result, Record)]
        direction = f"{task.source.name.lower()}:{task.target.name.lower()}"
        if not faults and task.target is TierId.DRAM and not _same_bytes(task, records):
            faults.append(Corrupt("the stored piece is not the one that the books name"))
        if faults:
            shell.counts["copy_failures", f"{direction}:{type(faults[0]).__name__}"] += 1
            reason = _reason_of(faults)
            shell.counts["corrupt_copies", task.source.name.lower()] += reason is Reason.CORRUPT
            shell.catalog.abort_copy(task.id, reason, shell.now_s())
            shell.apply()
            return False
        if task.target is TierId.DRAM:
            arena = shell.tiers.arena
            arena.mark_filling(_arena_records(task, records))
            arena.mark_ready([(m.target, m.checksum) for m in task.moves])
            stored = [StoredPiece(m.target, m.checksum) for m in task.moves]
        else:
            stored = [StoredPiece(r.place, r.checksum) for r in records]
            shell.counts["stored_bytes", ""] += sum(r.stored_length for r in records)
        shell.catalog.commit_copy(task.id, stored, shell.now_s())
        shell.apply(moved=records[0])
        shell.counts["copies", direction] += 1
        shell.counts["copy_bytes", direction] += sum(m.length for m in task.moves)
        return True

    def _tell_if_failed(self, task: CopyTask, is_there: bool) -> None:
        """Who was answered PENDING waits for an event."""
        key = self._loading.pop(task.target_copy, b"")
        layout = self._shell.layouts.get(task.ns)
        if not is_there and task.target is TierId.DRAM and layout is not None:
            self._shell.events.add(
                EventKind.LOAD_FAILED,
                digest=layout.digest,
                key=key,
                tier=task.target,
                parent=fingerprint_bytes(task.parent),
                depth_blocks=task.depth,
            )

    def _batches(self, tasks: Sequence[CopyTask]) -> Iterator[list[CopyTask]]:
        """Consecutive tasks of one direction, cut at the bounds; order is kept: prefixes lie together."""
        for target, run in groupby(tasks, key=lambda task: task.target):
            is_load = target is TierId.DRAM
            bytes_max = self._bounds.load_bytes if is_load else self._bounds.store_bytes
            pieces_max = self._bounds.load_pieces if is_load else self._bounds.store_pieces
            batch: list[CopyTask] = []
            size = pieces = 0
            for task in run:
                length = sum(move.length for move in task.moves)
                if batch and (size + length > bytes_max or pieces + len(task.moves) > pieces_max):
                    yield batch
                    batch, size, pieces = [], 0, 0
                batch.append(task)
                size, pieces = size + length, pieces + len(task.moves)
            if batch:
                yield batch

    def _disk(self) -> Tier:
        return self._shell.tiers.tier(TierId.NVME)


def _by_task(
    batch: Sequence[CopyTask], results: Sequence[Result]
) -> Iterator[tuple[CopyTask, Sequence[Result]]]:
    begin = 0
    for task in batch:
        yield task, results[begin : begin + len(task.moves)]
        begin += len(task.moves)


def _results_of(
    batch: Sequence[CopyTask], end: Ended[list[Result]]
) -> Iterator[tuple[CopyTask, Sequence[Result | BaseException]]]:
    if end.error is None:
        return _by_task(batch, end.unwrap())
    error = end.error
    return ((task, [error]) for task in batch)


def _same_bytes(task: CopyTask, records: Sequence[Record]) -> bool:
    """The tier checked bytes against its own record; this checks that record against the books."""
    return all(
        record.checksum == move.checksum and record.length == move.length
        for record, move in zip(records, task.moves, strict=True)
    )


def _reason_of(faults: Sequence[BaseException]) -> Reason:
    """CORRUPT, which drops the source too, only where the bytes are bad."""
    if any(isinstance(fault, Corrupt) for fault in faults):
        return Reason.CORRUPT
    return Reason.NO_SPACE if isinstance(faults[0], NoSpace) else Reason.IO_ERROR


def _arena_records(task: CopyTask, records: Sequence[Record]) -> list[Record]:
    return [
        replace(
            record,
            place=move.target,
            stored_length=record.length,
            stored_checksum=record.checksum,
            codec=0,
            generation=task.generation,
            heat=int(task.heat),
            hits=task.hits,
            depth=task.depth,
            valid_tokens=task.valid_tokens,
            parent=fingerprint_bytes(task.parent),
            leased=False,
            owner_pid=0,
            state=State.FILLING,
        )
        for record, move in zip(records, task.moves, strict=True)
    ]
