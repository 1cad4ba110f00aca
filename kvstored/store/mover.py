"""Carries the catalog's copies between DRAM and the other tiers, and what lies packed on NVMe straight to GPUs.

A batch of tasks, or a run, is one call of the tier, in its lane: on the way down that is one group commit. The tier checks the bytes on
their way against the checksum that the writer gave. Books are closed only in the completion callback, on the loop, when the thread has let
go of source and target; who waits, waits for the flight.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import NamedTuple, TypeVar

from kvstored.core.bandwidth import Bandwidth
from kvstored.core.calls import CopyTask
from kvstored.core.copying import Copying, CopyRun
from kvstored.core.travel import loads_in_order
from kvstored.core.types import KeyBatch, TierId
from kvstored.errors import Busy, KvstoredError, Unavailable
from kvstored.store import carrying
from kvstored.store.arrivals import Arrival
from kvstored.store.carrying import Result, by_task, joined, none_of
from kvstored.store.closing import Closing
from kvstored.store.flights import Flights
from kvstored.store.lane import Ended, Running, Urgency
from kvstored.store.shell import Shell
from kvstored.store.speeds import Speeds
from kvstored.tiers.base import Carried

T = TypeVar("T")
NOT_WANTED = "the copy is not wanted any more"


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much one lane call carries.

    Loads are of a few system calls of the disk: the lane's threads keep several in flight, one decodes while others read, and the
    first bytes are there soon. Copies from and to a GPU are one submission: half a millisecond of PCIe. Write-back is long, because a commit
    costs the same whatever it holds. What is loaded as a run
    becomes readable in larger parts: that costs the loop a millisecond whatever it holds.
    """

    load_bytes: int = 4 << 20
    load_pieces: int = 256
    store_bytes: int = 64 << 20
    store_pieces: int = 2048
    commit_bytes: int = 64 << 20
    commit_pieces: int = 2048
    hbm_bytes: int = 32 << 20
    hbm_pieces: int = 4096


class Way(NamedTuple):
    """Of one lane call: between DRAM and `other`."""

    other: TierId
    target: TierId
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Order:
    """What all copies of one `start` have in common. `ended` is called on the loop with how many are there now and how many failed. `arrival` is told
    of layers as they come: its copies go up together, in one call."""

    urgency: Urgency
    is_wanted: Callable[[], bool]
    ended: Callable[[int, int], None]
    arrival: Arrival | None = None


class Mover:
    """`start` never waits and never raises: a copy that finds no room in the lane is aborted like one that failed."""

    def __init__(
        self,
        shell: Shell,
        flights: Flights,
        speeds: Speeds,
        bounds: Bounds | None = None,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self._shell = shell
        self._speeds = speeds
        self._bandwidth = bandwidth or Bandwidth(0)
        self._flights = flights
        self._closing = Closing(shell)
        self._bounds = bounds or Bounds()
        self._tasks_now = 0
        self._loading: dict[int, bytes] = {}
        """Full key of each load by its target copy: a load that fails has no record to read it from."""

    @property
    def tasks_now(self) -> int:
        """Copies begun and not ended."""
        return self._tasks_now

    def start(
        self,
        copying: Sequence[Copying],
        urgency: Urgency,
        *,
        keys: KeyBatch | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        ended: Callable[[int, int], None] = lambda *_: None,
        arrival: Arrival | None = None,
    ) -> None:
        """Carry them; `keys`: of the call that asked for loads, each of which ends in a LOADED or a LOAD_FAILED event.

        `is_wanted` is asked in the lane just before a batch begins: a batch that nobody wants any more is aborted untouched.
        """
        order = Order(urgency, is_wanted, ended, arrival)
        tasks = [each for each in self._in_order(copying) if isinstance(each, CopyTask)]
        if keys is not None and tasks:
            self._note_keys(tasks, keys)
        for batch in self._batches(tasks) if arrival is None else [tasks]:
            self._open(batch)
            if arrival is None:
                self._submit_tasks(batch, order)
            else:
                self._check_first(batch, order)
        for each in copying:
            if isinstance(each, CopyRun):
                for part in self._commits(each):
                    self._submit_run(part, keys, order)

    def _in_order(self, copying: Sequence[Copying]) -> list[Copying]:
        catalog = self._shell.catalog
        return loads_in_order(catalog.books, catalog.feedback, copying, self._shell.now_s())

    def _note_keys(self, tasks: Sequence[CopyTask], keys: KeyBatch) -> None:
        wanted = {task.fingerprint for task in tasks}
        names = {
            (low, high): keys.key(i)
            for i, (low, high) in enumerate(keys.fingerprints.tolist())
            if (low, high) in wanted
        }
        for task in tasks:
            self._loading[task.target_copy] = names[task.fingerprint]

    # ---- tasks

    def _open(self, batch: Sequence[CopyTask]) -> None:
        for task in batch:
            self._flights.begin([task.target_copy])
        self._tasks_now += len(batch)

    def _check_first(self, batch: list[CopyTask], order: Order) -> None:
        """Sources of copies that go up in order are all hashed before the first byte goes, by as many threads as the lane has: one would take longer than
        the link."""
        arena, lane = self._shell.tiers.arena, self._shell.tiers.lane(TierId.HBM)
        share = -(-len(batch) // lane.threads)
        parts = [batch[begin : begin + share] for begin in range(0, len(batch), share)]
        found: dict[int, list[Result | None]] = {}

        def landed(at: int, end: Ended[list[Result | None]]) -> None:
            self._report(end.error)
            count = sum(len(task.moves) for task in parts[at])
            lost = [Unavailable(f"not checked: {end.error!r}")] * count
            found[at] = end.unwrap() if end.error is None else [*lost]
            if len(found) == len(parts):
                faults = [fault for i in range(len(parts)) for fault in found[i]]
                if any(faults) and order.arrival is not None:
                    order.arrival.void()
                self._submit_tasks(batch, order, faults)

        for at, part in enumerate(parts):
            try:
                running = lane.submit(partial(carrying.check, arena, part), order.urgency)
            except Busy as error:
                landed(at, Ended(None, error))
            else:
                running.when_ended(partial(landed, at))

    def _submit_tasks(
        self, batch: list[CopyTask], order: Order, faults: Sequence[Result | None] = ()
    ) -> None:
        """`faults`: of pieces that were looked at before."""
        way = Way(_other_tier(batch[0]), batch[0].target, sum(task.size_bytes for task in batch))

        def work() -> list[Result]:
            if not order.is_wanted():
                return [Busy(NOT_WANTED)] * sum(len(t.moves) for t in batch)
            if order.arrival is not None:
                tiers = self._shell.tiers
                arena, hbm = tiers.arena, tiers.hbm_records
                return carrying.lift_in_order(arena, hbm, batch, order.arrival, faults)
            return self._carry(batch)

        def landed(end: Ended[list[Result]]) -> None:
            self._report(end.error)
            there = 0
            for task, results in _results_of(batch, end):
                key = self._loading.pop(task.target_copy, b"")
                there += self._closing.task(task, results, key)
                self._flights.land([task.target_copy])
            self._end(order, there, len(batch))

        self._submit(work, order, way, landed)

    def _carry(self, batch: Sequence[CopyTask]) -> list[Result]:
        """In the lane's thread."""
        tiers, (source, target) = self._shell.tiers, (batch[0].source, batch[0].target)
        if target is TierId.DRAM:
            return carrying.load(tiers.arena, tiers.tier(source), batch)
        if source is TierId.DRAM:
            return carrying.store(tiers.arena, tiers.tier(target), batch)
        return carrying.lift_packed(tiers, batch)

    def _batches(self, tasks: Sequence[CopyTask]) -> Iterator[list[CopyTask]]:
        """Consecutive tasks of one direction, cut at the bounds; order is kept: prefixes lie together."""
        for _, run in groupby(tasks, key=lambda task: (task.source, task.target)):
            batch: list[CopyTask] = []
            size = pieces = 0
            for task in run:
                bytes_max, pieces_max = self._most(task)
                length = sum(move.length for move in task.moves)
                if batch and (size + length > bytes_max or pieces + len(task.moves) > pieces_max):
                    yield batch
                    batch, size, pieces = [], 0, 0
                batch.append(task)
                size, pieces = size + length, pieces + len(task.moves)
            if batch:
                yield batch

    # ---- runs

    def _submit_run(self, run: CopyRun, keys: KeyBatch | None, order: Order) -> None:
        """In as many lane calls as it takes; its books are closed when the last has landed."""
        calls = [run.part_of(begin, end) for begin, end in self._stretches(run)]
        came: dict[int, Carried] = {}

        def key_of(i: int) -> bytes:
            return keys.key(int(run.asked[i])) if keys is not None else b""

        def landed(at: int, end: Ended[Carried]) -> None:
            self._report(end.error)
            came[at] = end.unwrap() if end.error is None else none_of(len(calls[at]), end.error)
            if len(came) == len(calls):
                whole = joined([came[i] for i in range(len(calls))])
                there = self._closing.run(run, whole, key_of)
                self._flights.land(copies)
                self._end(order, there, len(run))

        copies = run.target_copies.tolist()
        self._flights.begin(copies)
        self._tasks_now += len(run)
        for at, call in enumerate(calls):
            way = Way(_other_tier(call), call.target, call.size_bytes)
            self._submit(self._work_of(call, order), order, way, partial(landed, at))

    def _work_of(self, run: CopyRun, order: Order) -> Callable[[], Carried]:
        arena, tier = self._shell.tiers.arena, self._shell.tiers.tier(_other_tier(run))
        carry = carrying.load_run if run.target is TierId.DRAM else carrying.store_run

        def work() -> Carried:
            if not order.is_wanted():
                raise Busy(NOT_WANTED)
            return carry(arena, tier, run)

        return work

    def _stretches(self, run: CopyRun) -> list[tuple[int, int]]:
        """Of one lane call each."""
        bytes_max, pieces_max = self._most(run)
        most = max(1, min(pieces_max, bytes_max // run.length))
        return [(begin, min(begin + most, len(run))) for begin in range(0, len(run), most)]

    def _commits(self, run: CopyRun) -> list[CopyRun]:
        """Parts that become readable together."""
        bounds = self._bounds
        most = max(1, min(bounds.commit_pieces, bounds.commit_bytes // run.length))
        if len(run) <= most:
            return [run]
        ends = [*range(most, len(run), most), len(run)]
        return self._shell.catalog.carriage.cut(run, ends)

    # ---- both

    def _submit(
        self,
        work: Callable[[], T],
        order: Order,
        way: Way,
        landed: Callable[[Ended[T]], None],
    ) -> None:
        shell, lane, speeds = self._shell, self._shell.tiers.lane(way.other), self._speeds
        if wait_s := self._pause_s(way, order.urgency):
            loop = asyncio.get_running_loop()
            loop.call_later(wait_s, self._submit, work, order, way, landed)
            return
        try:
            running: Running[T] = lane.submit(work, order.urgency)
        except Busy as error:
            landed(Ended(None, error))
            return
        begun_s = shell.elapsed_s()
        is_load = way.target is TierId.DRAM and way.other is TierId.NVME
        if is_load:
            speeds.load_begun(way.size_bytes, order.urgency)

        def observed(end: Ended[T]) -> None:
            shell.metrics.copy_seconds[way.target].observe(shell.elapsed_s() - begun_s)
            if is_load:
                is_good = end.error is None
                speeds.load_ended(way.size_bytes, order.urgency, begun_s, is_good=is_good)
            landed(end)

        running.when_ended(observed)

    def _pause_s(self, way: Way, urgency: Urgency) -> float:
        """How long copies to and from GPUs leave the link to others."""
        if way.other is not TierId.HBM:
            return 0.0
        take = self._bandwidth.take_background
        if urgency is Urgency.DEMAND:
            take = self._bandwidth.take_demand
        return take(way.size_bytes, self._shell.elapsed_s())

    def _end(self, order: Order, there: int, count: int) -> None:
        self._tasks_now -= count
        order.ended(there, count - there)

    def _report(self, error: BaseException | None) -> None:
        """What is no fault of the world's."""
        if error is not None and not isinstance(error, KvstoredError):
            self._shell.report("copy failed", error)

    def _most(self, copying: Copying) -> tuple[int, int]:
        bounds = self._bounds
        if TierId.NVME is copying.source:  # also what goes on to a GPU: its threads decode
            return bounds.load_bytes, bounds.load_pieces
        if _other_tier(copying) is TierId.HBM:
            return bounds.hbm_bytes, bounds.hbm_pieces
        return bounds.store_bytes, bounds.store_pieces


def _other_tier(copying: Copying) -> TierId:
    """The one beside DRAM; in what goes from NVMe to a GPU the GPU, whose lane carries it."""
    return copying.source if copying.target is TierId.DRAM else copying.target


def _results_of(
    batch: Sequence[CopyTask], end: Ended[list[Result]]
) -> Iterator[tuple[CopyTask, Sequence[Result | BaseException]]]:
    if end.error is None:
        return by_task(batch, end.unwrap())
    error = end.error
    return ((task, [error]) for task in batch)
