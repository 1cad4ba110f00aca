"""What a lane's thread does for copies on their way: bytes and records between the arena and a slower tier. No books here."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from kvstored.core.calls import CopyTask, PieceMove
from kvstored.core.copying import CopyRun
from kvstored.errors import Corrupt, KvstoredError, Unavailable
from kvstored.store.arrivals import Arrival
from kvstored.store.shell import Tiers, fingerprint_bytes
from kvstored.tiers import record_runs
from kvstored.tiers.arena import Arena
from kvstored.tiers.base import Carried, Crossed, PieceRef, PieceRun, Tier, Views, ref_of
from kvstored.tiers.hbm import Hbm
from kvstored.tiers.record import RECORD, Base, Record, State
from kvstored.tiers.views import hash_of

Result = Record | KvstoredError
OTHER_PIECE = "the stored piece is not the one that the books name"


def load(arena: Arena, disk: Tier, batch: Sequence[CopyTask]) -> list[Result]:
    """NVMe -> DRAM, straight into the arena; the records are the disk's."""
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


def load_run(arena: Arena, disk: Tier, run: CopyRun) -> Carried:
    """The same for a run, whose records in the arena are written too: they want nothing but to be ready."""
    slots = arena.slots(run.targets)
    came = disk.read_run(PieceRun(run.fingerprints, run.sources, run.length, slots))
    is_other = came.records["checksum"] != run.checksums
    is_other |= came.records["length"] != run.length
    others = [i for i in np.flatnonzero(is_other).tolist() if i not in came.faults]
    came.faults.update({i: Corrupt(OTHER_PIECE) for i in others})
    values: dict[str, ArrayLike] = {
        "state": State.FILLING,
        "leased": 0,
        "owner_pid": 0,
        "codec": 0,
        "stored_length": run.length,
        "stored_checksum": run.checksums,
        "generation": run.generations,
        "heat": run.heats,
        "hits": run.hits,
        "depth": run.depths,
        "valid_tokens": run.valid_tokens,
        "parent": run.parents,
    }
    records = record_runs.moved(came.records, run.targets, values)
    good = [i for i in range(len(run)) if i not in came.faults]
    arena.put_many(records[good], run.targets.at(good))
    return Carried(records, run.targets.units, came.faults)


def store(arena: Arena, disk: Tier, batch: Sequence[CopyTask]) -> list[Result]:
    """DRAM -> NVMe, one group commit. Of a task that failed in part nothing stays behind."""
    results = disk.write(_in_dram(arena, batch))
    _drop_orphans(disk, batch, results)
    return results


def check(arena: Arena, batch: Sequence[CopyTask]) -> list[Result | None]:
    """Of each piece in DRAM the fault, None where its bytes are what they should be."""
    return [
        None
        if hash_of(arena.views(move.source, move.length)) == move.checksum
        else Corrupt(f"source does not match its checksum: length={move.length}")
        for task in batch
        for move in task.moves
    ]


def lift_in_order(
    arena: Arena,
    hbm: Hbm,
    batch: Sequence[CopyTask],
    arrival: Arrival,
    faults: Sequence[Result | None],
) -> list[Result]:
    """DRAM -> HBM, layer by layer over all of them; `faults` as `check` found them."""
    items = _in_dram(arena, batch)
    sound = [item for item, fault in zip(items, faults, strict=True) if fault is None]
    written = iter(hbm.write_in_order(sound, arrival.layers, arrival))
    results = [next(written) if fault is None else fault for fault in faults]
    _drop_orphans(hbm, batch, results)
    return results


def _in_dram(arena: Arena, batch: Sequence[CopyTask]) -> list[tuple[Record, Views]]:
    """Pieces with the records that they will have."""
    return [
        (
            replace(
                arena.record_at(move.source),
                place=move.target,
                checksum=move.checksum,
                content=task.content,
                base=base_of(move),
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


def lift_packed(tiers: Tiers, batch: Sequence[CopyTask]) -> list[Result]:
    """NVMe -> HBM: read, checked as it was stored, unpacked, and made plain bytes by the GPU."""
    moves = [(task, move) for task in batch for move in task.moves]
    came = tiers.unpack_disk(
        [
            (
                PieceRef(fingerprint_bytes(task.fingerprint), move.group, move.shard),
                move.source,
                move.length,
            )
            for task, move in moves
        ]
    )
    results: list[Result] = []
    items: list[Crossed] = []
    for (task, move), each in zip(moves, came, strict=True):
        if isinstance(each, Crossed) and each.record.checksum != move.checksum:
            results.append(Corrupt(OTHER_PIECE))
        elif isinstance(each, Crossed):
            results.append(each.record)
            items.append(Crossed(_lifted(task, move, each.record), each.unpacked))
        else:
            results.append(each)
    written = iter(tiers.hbm_records.write_packed(items))
    results = [next(written) if isinstance(result, Record) else result for result in results]
    _drop_orphans(tiers.hbm_records, batch, results)
    return results


def _lifted(task: CopyTask, move: PieceMove, record: Record) -> Record:
    return replace(
        record,
        place=move.target,
        content=0,
        generation=task.generation,
        heat=int(task.heat),
        hits=task.hits,
        depth=task.depth,
        valid_tokens=task.valid_tokens,
        parent=fingerprint_bytes(task.parent),
        owner_pid=0,
    )


def _drop_orphans(tier: Tier, batch: Sequence[CopyTask], results: Sequence[Result]) -> None:
    """Of a task that failed in part nothing stays behind."""
    orphans = [
        (ref_of(record), record.place)
        for _, ends in by_task(batch, results)
        if any(isinstance(end, KvstoredError) for end in ends)
        for record in ends
        if isinstance(record, Record)
    ]
    if orphans:
        tier.discard(orphans)


def base_of(move: PieceMove) -> Base | None:
    if move.base is None:
        return None
    return Base(fingerprint=fingerprint_bytes(move.base.fingerprint), place=move.base.place)


def store_run(arena: Arena, disk: Tier, run: CopyRun) -> Carried:
    """The same for a run. A piece whose record in the arena is damaged stays where it is."""
    records = arena.heads(run.sources).view(RECORD).reshape(-1)
    sound = np.flatnonzero(record_runs.vouch(records, run.sources)).tolist()
    values: dict[str, ArrayLike] = {
        "leased": 0,
        "checksum": run.checksums,
        "generation": run.generations,
        "heat": run.heats,
        "hits": run.hits,
    }
    moved = record_runs.moved(records, run.targets, values)
    slots = arena.slots(run.sources)
    pieces = PieceRun(
        run.fingerprints[sound], run.targets.at(sound), run.length, [slots[i] for i in sound]
    )
    stored = disk.write_run(pieces, moved[sound])
    faults: dict[int, KvstoredError] = {sound[i]: error for i, error in stored.faults.items()}
    damaged = set(range(len(run))).difference(sound)
    faults.update({i: Corrupt("record in the arena is damaged") for i in damaged})
    units = run.targets.units.copy()
    units[sound] = stored.units
    moved[sound] = stored.records
    return Carried(moved, units, faults)


def joined(parts: Sequence[Carried]) -> Carried:
    """What came of a run whose stretches were carried one by one, in order."""
    if len(parts) == 1:
        return parts[0]
    faults: dict[int, KvstoredError] = {}
    begin = 0
    for part in parts:
        faults.update({begin + i: fault for i, fault in part.faults.items()})
        begin += len(part.records)
    return Carried(
        # as words: numpy looks at every field of a record to join such arrays
        np.concatenate([part.records.view(np.uint64) for part in parts]).view(RECORD),
        np.concatenate([part.units for part in parts]),
        faults,
    )


def none_of(count: int, error: BaseException) -> Carried:
    """A stretch of which nothing was carried."""
    cause = error if isinstance(error, KvstoredError) else Unavailable(f"copy failed: {error!r}")
    nothing = np.zeros(count, dtype=RECORD)
    return Carried(nothing, np.zeros(count, dtype=np.int64), dict.fromkeys(range(count), cause))


def by_task(
    batch: Sequence[CopyTask], results: Sequence[Result]
) -> Iterator[tuple[CopyTask, Sequence[Result]]]:
    begin = 0
    for task in batch:
        yield task, results[begin : begin + len(task.moves)]
        begin += len(task.moves)
