"""One visit: a server started, its cells measured beside the copy, bytes checked, everything stopped again."""

import importlib
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.peers.adapters.base import Environment, Need, Peer, Server
from bench.peers.contestants import Contestant
from bench.peers.crew import Crew, PeerFailed, WorkerLost
from bench.peers.figures import Failed, Measured, Taken, measured_of
from bench.peers.plan import COLD, PUT, Shape, Visit
from bench.peers.processes import ServerFailed

TURNS = 2
"""How often the peer and the copy alternate within a cell."""
SAMPLES_MIN, SAMPLES_MAX = 3, 1000
SEED = 7

Outcome = Measured | Failed


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a cell samples in each turn, and how long a visit warms up at most."""

    budget_s: float
    warm_up_s: float


def visited(
    visit: Visit, contestant: Contestant, environment: Environment, pace: Pace, log: Path
) -> list[Outcome]:
    """Every cell of the visit: measured, or failed with the reason."""
    done: list[Outcome] = []
    try:
        with (
            log.open("ab") as output,
            tempfile.TemporaryDirectory(prefix="kvstored-bench-") as folder,
            _peer(contestant.module).serve(environment, Path(folder), _need(visit)) as server,
            Crew(environment, visit.clients, output.fileno()) as crew,
        ):
            crew.open(_module(contestant), contestant.way, server.address)
            cells = (
                _cold(visit, contestant, crew, server)
                if visit.medium == COLD
                else _warm(visit, contestant, crew, pace)
            )
            done.extend(cells)
    except (PeerFailed, ServerFailed, OSError, RuntimeError) as error:
        measured = {(each.shape, each.verb) for each in done}
        done += [
            _failed(visit, contestant, shape, verb, str(error))
            for shape in visit.shapes
            for verb in contestant.verbs
            if (shape, verb) not in measured
        ]
    return done


def environment_of(contestant: Contestant) -> Environment:
    """Installs what is lacking; raises Missing."""
    return _peer(contestant.module).environment(contestant.way)


def _warm(visit: Visit, contestant: Contestant, crew: Crew, pace: Pace) -> Iterator[Outcome]:
    _warm_up(visit, crew, pace)
    for shape in visit.shapes:
        name = shape.words
        try:
            _begin(crew, shape, shape.sets, "copy")
            crew.all(shape.clients, "fill", name=name)
            made: list[Measured] = []
            for verb in contestant.verbs:
                made.append(_sampled(visit, shape, verb, crew, pace))
                crew.all(shape.clients, "fill", name=name)
            crew.all(shape.clients, "check", name=name)
            yield from made
        except WorkerLost:
            raise
        except PeerFailed as error:
            for verb in contestant.verbs:
                yield _failed(visit, contestant, shape, verb, str(error))
        crew.all(shape.clients, "end", name=name)


def _warm_up(visit: Visit, crew: Crew, pace: Pace) -> None:
    """All clients go through the whole capacity once: what is touched for the first time is touched now. What fails here will fail and be
    told in its own cell."""
    shape = max(visit.shapes, key=lambda each: (each.clients, each.blocks))
    with suppress(PeerFailed):
        _begin(crew, shape, shape.sets, "copy")
        size_bytes = visit.capacity_bytes
        budget_s = pace.warm_up_s
        crew.all(
            shape.clients, "warm_up", name=shape.words, size_bytes=size_bytes, budget_s=budget_s
        )
    crew.all(shape.clients, "end", name=shape.words)


def _sampled(visit: Visit, shape: Shape, verb: str, crew: Crew, pace: Pace) -> Measured:
    """Puts go into room that was made before, so there are at most as many as there are sets."""
    turns: list[list[Taken]] = []
    beside: list[list[Taken]] = []
    most = min(SAMPLES_MAX, shape.sets) if verb == PUT else SAMPLES_MAX
    for _ in range(TURNS):
        for what, taken in ((verb, turns), (f"beside {verb}", beside)):
            if what == PUT:
                crew.all(shape.clients, "drop", name=shape.words)
            taken.append(
                crew.sample(
                    shape.clients,
                    shape.words,
                    what,
                    budget_s=pace.budget_s,
                    least=SAMPLES_MIN,
                    most=most,
                )
            )
    where = (visit.round_, visit.contestant, shape, visit.medium, verb)
    return measured_of(where, turns, beside)


def _cold(visit: Visit, contestant: Contestant, crew: Crew, server: Server) -> Iterator[Outcome]:
    """All shapes are stored, everything leaves memory, then every byte is read once, in turns with a read of a plain file."""
    for shape in visit.shapes:
        _begin(crew, shape, shape.cold_sets, "file")
        crew.all(shape.clients, "fill", name=_cold_name(shape))
    crew.all(visit.clients, "leave")
    server.chill()
    crew.open(_module(contestant), contestant.way, server.address)
    (verb,) = contestant.verbs
    for shape in visit.shapes:
        try:
            yield _read_once(visit, shape, verb, crew)
        except WorkerLost:
            raise
        except PeerFailed as error:
            yield _failed(visit, contestant, shape, verb, str(error))


def _read_once(visit: Visit, shape: Shape, verb: str, crew: Crew) -> Measured:
    turns: list[list[Taken]] = []
    beside: list[list[Taken]] = []
    name = _cold_name(shape)
    for count in _shares(shape.cold_sets, SAMPLES_MIN):
        for what, taken in ((verb, turns), (f"beside {verb}", beside)):
            came = crew.sample(shape.clients, name, what, budget_s=0.0, least=count, most=count)
            taken.append(came)
    crew.all(shape.clients, "check", name=name)
    return measured_of((visit.round_, visit.contestant, shape, visit.medium, verb), turns, beside)


def _begin(crew: Crew, shape: Shape, sets: int, beside: str) -> None:
    crew.begin(
        shape.clients,
        SEED + 1_000_003 * shape.batch + 1_009 * shape.clients,
        name=shape.words if beside == "copy" else _cold_name(shape),
        block_bytes=shape.block_bytes,
        blocks=shape.blocks,
        sets=sets,
        beside=beside,
    )


def _cold_name(shape: Shape) -> str:
    """Several cells are there at a time."""
    return f"{shape.words} {shape.clients}"


def _shares(total: int, parts: int) -> list[int]:
    parts = min(parts, total)
    return [total // parts + (i < total % parts) for i in range(parts)]


def _failed(visit: Visit, contestant: Contestant, shape: Shape, verb: str, reason: str) -> Failed:
    return Failed(visit.round_, contestant.name, shape, visit.medium, verb, reason)


def _need(visit: Visit) -> Need:
    return Need(
        visit.block_bytes,
        visit.capacity_bytes,
        max(shape.blocks for shape in visit.shapes),
        visit.clients,
        visit.medium == COLD,
    )


def _module(contestant: Contestant) -> str:
    return f"bench.peers.adapters.{contestant.module}"


def _peer(module: str) -> Peer:
    loaded: Peer = importlib.import_module(f"bench.peers.adapters.{module}")
    return loaded
