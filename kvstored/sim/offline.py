"""Replay without bytes: a trace on a model of the store, with the trace's own time.

The model that users run is the real core (sim/core.py); tests put a plain oracle in its place.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import Protocol

from kvstored.core.hints import NO_HINT, Hint
from kvstored.sim.hinting import hint_of
from kvstored.sim.measure import Recorder, Served
from kvstored.sim.report import Result, Setup, result
from kvstored.sim.traces import BlockIds, Request

PROGRESS_REQUESTS = 64


class Model(Protocol):
    """A store that serves whole requests: count the hits, then store and touch the path, then trim to capacity."""

    @property
    def evicted_blocks(self) -> int: ...

    @property
    def written_blocks(self) -> int:
        """To the slower tier."""

    def request(self, ts_s: float, block_ids: BlockIds, hint: Hint = NO_HINT) -> Served: ...


def replay_offline(
    requests: Iterable[Request],
    model: Model,
    setup: Setup,
    *,
    limit: int | None,
    hints: Sequence[str] = (),
    advance: Callable[[int], None],
) -> Result:
    """Serve the first `limit` requests in order; `advance` is told of progress, now and then."""
    recorder = Recorder()
    first_s: float | None = None
    begun_s = perf_counter()
    reported = 0
    unique: set[int] = set()
    for request in islice(requests, limit):
        first_s = request.ts_s if first_s is None else first_s
        asked_s = perf_counter()
        served = model.request(request.ts_s, request.block_ids, hint_of(request, hints))
        unique.update(request.block_ids.tolist())
        recorder.add(request.ts_s - first_s, served, perf_counter() - asked_s)
        if recorder.requests - reported >= PROGRESS_REQUESTS:
            advance(recorder.requests - reported)
            reported = recorder.requests
    advance(recorder.requests - reported)
    done = result(
        setup,
        recorder,
        evicted_blocks=model.evicted_blocks,
        elapsed_s=perf_counter() - begun_s,
    )
    return replace(done, written_blocks=model.written_blocks, unique_blocks=len(unique))
