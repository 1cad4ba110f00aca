"""Closes the books of copies that were carried, on the loop: commit or abort, records made ready, counts, and who waits is told.

A run is committed in one step; where that is not possible it is taken apart, and its copies end one by one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from kvstored.core.calls import CopyTask, Reason, StoredPiece
from kvstored.core.columnar import Places
from kvstored.core.copying import CopyRun
from kvstored.core.types import TierId
from kvstored.errors import Corrupt, NoSpace, NotFound
from kvstored.store.carrying import OTHER_PIECE, Result
from kvstored.store.events import EventKind
from kvstored.store.shell import Shell, fingerprint_bytes
from kvstored.tiers import record as layout
from kvstored.tiers.base import Carried
from kvstored.tiers.record import Record, State
from kvstored.tiers.values import LOSSY

KeyOf = Callable[[int], bytes]
"""The full key of a run's block, by its index."""


class Closing:
    def __init__(self, shell: Shell) -> None:
        self._shell = shell

    def task(self, task: CopyTask, results: Sequence[Result | BaseException], key: bytes) -> bool:
        """Whether the copy is there now. `key`: of a load that somebody asked for, whose failure has no record to read it from."""
        is_there = self._close(task, results)
        layout_ = self._shell.layouts.get(task.ns)
        if not is_there and key and layout_ is not None:
            self._shell.events.add(
                EventKind.LOAD_FAILED,
                digest=layout_.digest,
                key=key,
                tier=task.target,
                parent=fingerprint_bytes(task.parent),
                depth_blocks=task.depth,
            )
        return is_there

    def run(self, run: CopyRun, carried: Carried, key_of: KeyOf) -> int:
        """How many of its copies are there now."""
        parts = list(_stretches(run, carried))
        ends = [end for _, end in parts]
        cut = self._shell.catalog.carriage.cut(run, ends) if len(parts) > 1 else [run]
        there = 0
        for part, (begin, end) in zip(cut, parts, strict=True):
            is_good = begin not in carried.faults
            if is_good and self._commit(part, carried, begin):
                there += len(part)
                continue
            tasks = self._shell.catalog.carriage.take_apart(part)
            for i, task in zip(range(begin, end), tasks, strict=True):
                there += self.task(task, [self._result(run, carried, i)], key_of(i))
        return there

    # ---- runs

    def _commit(self, part: CopyRun, carried: Carried, begin: int) -> bool:
        shell, here = self._shell, slice(begin, begin + len(part))
        kept = Places(part.targets.segment, part.targets.start, carried.units[here])
        if not shell.catalog.carriage.commit_run(part, kept, shell.now_s()):
            return False
        if part.target is TierId.DRAM:
            # before the events and the projection, which read the records
            shell.tiers.arena.ready_many(part.targets, part.checksums)
        elif part.target is TierId.NVME:
            stored_bytes = int(carried.records["stored_length"][here].sum())
            shell.counts["stored_bytes", ""] += stored_bytes
            shell.catalog.admission.budget.settle(part.size_bytes, stored_bytes, shell.now_s())
        shell.apply()
        direction = f"{part.source.name.lower()}:{part.target.name.lower()}"
        shell.counts["copies", direction] += len(part)
        shell.counts["copy_bytes", direction] += part.size_bytes
        return True

    def _result(self, run: CopyRun, carried: Carried, i: int) -> Result:
        if i in carried.faults:
            return carried.faults[i]
        head = run.targets.place(i)[0]
        place = (head._replace(units=int(carried.units[i])),)
        return layout.unpack(carried.records[i].tobytes(), place)

    # ---- single tasks

    def _close(self, task: CopyTask, results: Sequence[Result | BaseException]) -> bool:
        shell = self._shell
        faults = [result for result in results if not isinstance(result, Record)]
        records = [result for result in results if isinstance(result, Record)]
        direction = f"{task.source.name.lower()}:{task.target.name.lower()}"
        if not faults and task.target is not TierId.NVME and not _same_bytes(task, records):
            faults.append(Corrupt(OTHER_PIECE))
        if faults:
            shell.counts["copy_failures", f"{direction}:{type(faults[0]).__name__}"] += 1
            reason = _reason_of(faults)
            shell.counts["corrupt_copies", task.source.name.lower()] += reason is Reason.CORRUPT
            shell.catalog.carriage.abort(task.id, reason, shell.now_s())
            shell.apply()
            return False
        if task.target is TierId.DRAM:
            arena = shell.tiers.arena
            arena.mark_filling(_arena_records(task, records))
            arena.mark_ready([(m.target, m.checksum) for m in task.moves])
            stored = [StoredPiece(m.target, m.checksum) for m in task.moves]
        else:
            stored = [
                StoredPiece(r.place, r.checksum, r.base is not None, bool(r.flags & LOSSY))
                for r in records
            ]
        if task.target is TierId.NVME:
            stored_bytes = sum(r.stored_length for r in records)
            shell.counts["stored_bytes", ""] += stored_bytes
            begun_bytes = sum(move.length for move in task.moves)
            shell.catalog.admission.budget.settle(begun_bytes, stored_bytes, shell.now_s())
        shell.catalog.carriage.commit(task.id, stored, shell.now_s())
        shell.apply(moved=records[0])
        shell.counts["copies", direction] += 1
        shell.counts["copy_bytes", direction] += sum(m.length for m in task.moves)
        return True


def _stretches(run: CopyRun, carried: Carried) -> Iterator[tuple[int, int]]:
    """Begin and end of what went well together, and of what did not."""
    begin = 0
    for i in range(1, len(run) + 1):
        if i == len(run) or (i in carried.faults) != (begin in carried.faults):
            yield begin, i
            begin = i


def _same_bytes(task: CopyTask, records: Sequence[Record]) -> bool:
    """The tier checked bytes against its own record; this checks that record against the books."""
    return all(
        record.checksum == move.checksum and record.length == move.length
        for record, move in zip(records, task.moves, strict=True)
    )


def _reason_of(faults: Sequence[BaseException]) -> Reason:
    """CORRUPT, which drops the source too, only where the bytes are bad, or the tier has no such piece: kept in the books it would be
    present to every put and a miss to every get."""
    if any(isinstance(fault, Corrupt | NotFound) for fault in faults):
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
            content=0,
            base=None,
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
