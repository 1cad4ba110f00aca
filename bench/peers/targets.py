"""What the data plane must show, checked against the figures of a run: each target with what was measured and whether it is met. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.peers.contestants import (
    BY_NAME,
    COPY_2,
    ECHO,
    HASHED,
    LEASED,
    OURS,
    OURS_COLD,
    POSTED,
    REDIS,
    UNCHECKED,
    VIEWS,
    Kind,
)
from bench.peers.figures import Figure
from bench.peers.plan import COLD, GET, PUT, WARM, Shape

KIB, MIB = 1 << 10, 1 << 20
MATCH_1000, MATCH_4096 = "match + acquire 1,000 keys", "match + acquire 4,096 keys"
LOOP_LAG, PRIVATE_MEMORY = "store-loop lag p99 above an idle probe", "RssAnon at 100,000 blocks"


@dataclass(frozen=True, slots=True)
class Checked:
    """`measured` is None where the run had no such cell. `echoed`: what a bare echo and the copy reach in the same run, where the way that is measured
    needs a message a call."""

    name: str
    bound: float
    unit: str
    is_least: bool
    measured: float | None
    echoed: float | None = None

    @property
    def is_met(self) -> bool | None:
        if self.measured is None:
            return None
        return self.measured >= self.bound if self.is_least else self.measured <= self.bound


class Figures:
    """Figures by what they are of."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self._by_cell = {(f.contestant, f.shape, f.medium, f.verb): f for f in figures}

    def of(self, contestant: str, shape: Shape, verb: str, medium: str = WARM) -> Figure | None:
        return self._by_cell.get((contestant, shape, medium, verb))

    def cells(self) -> list[tuple[Shape, str, str]]:
        """Shape, medium and verb of all that was measured, in order."""
        found = {(shape, medium, verb) for _, shape, medium, verb in self._by_cell}
        return sorted(
            found, key=lambda c: (c[1] != WARM, c[2], c[0].block_bytes, c[0].batch, c[0].clients)
        )

    def contestants(self, shape: Shape, medium: str, verb: str, kind: Kind) -> list[Figure]:
        return [
            figure
            for (name, *cell), figure in self._by_cell.items()
            if cell == [shape, medium, verb] and BY_NAME[name].kind is kind
        ]


def checked(figures: Sequence[Figure], probes: Mapping[str, float]) -> list[Checked]:
    """In the order in which they were asked for. `probes`: medians by name, in the unit of their target."""
    of = Figures(figures)
    return [*_large(of), *_small(of), *_puts(of), *_together(of), *_probed(probes)]


def behind(figures: Sequence[Figure]) -> list[str]:
    """Where a peer is ahead of the best way of ours, in words."""
    of = Figures(figures)
    lines = []
    for shape, medium, verb in of.cells():
        ours = of.contestants(shape, medium, verb, Kind.OURS)
        peers = of.contestants(shape, medium, verb, Kind.PEER)
        copying = [figure for figure in ours if figure.contestant not in (VIEWS, POSTED)]
        if not copying or not peers:
            continue
        best = max(copying, key=lambda figure: figure.rate)
        posted = of.of(POSTED, shape, verb, medium)
        for peer in sorted(peers, key=lambda figure: -figure.rate):
            if peer.rate > best.rate:
                ahead = f"{peer.contestant} {peer.rate / best.rate:.2f}x"
                beside = f" ({peer.rate / posted.rate:.2f}x of posted)" if posted else ""
                lines.append(f"{verb} {shape.words}, {shape.clients} clients: {ahead}{beside}")
    return lines


def _large(of: Figures) -> list[Checked]:
    made = []
    for size, batch, least in ((MIB, 1, 0.85), (MIB, 64, 0.9), (32 * MIB, 1, 0.9)):
        shape = Shape(size, batch, 1)
        hashed = of.of(HASHED, shape, GET)
        plain = of.of(UNCHECKED, shape, GET)
        echo = _ratio(of.of(ECHO, shape, GET))
        name = f"get {shape.words}, leased, unchecked / shm copy"
        made.append(_least(name, least, _ratio(plain), echo))
        for way, echoed in ((OURS, None), (LEASED, _echoed(echo, _ratio(hashed)))):
            against = _over(_ratio(of.of(way, shape, GET)), _ratio(hashed))
            made.append(_least(f"get {shape.words}, {way} / copy + xxh3", 0.9, against, echoed))
    views = of.of(VIEWS, Shape(MIB, 64, 1), GET)
    made.append(_least("get 1 MiB x 64, views (unchecked) / shm copy", 5.0, _ratio(views)))
    cold = of.of(OURS_COLD, Shape(MIB, 64, 1), GET, COLD)
    made.append(_least("get 1 MiB x 64 from disk / O_DIRECT read", 0.8, _ratio(cold)))
    return made


def _small(of: Figures) -> list[Checked]:
    made = []
    for size in (4 * KIB, 64 * KIB):
        shape = Shape(size, 1, 1)
        redis = _p50(of.of(REDIS, shape, GET))
        ours = _fastest(of, shape, GET)
        made.append(_most(f"get {shape.words}: p50 / Redis", 0.5, _over(ours, redis)))
    for size, most in ((4 * KIB, 1.9), (64 * KIB, 1.2)):
        shape = Shape(size, 64, 1)
        taken = _over(1.0, _ratio(of.of(OURS, shape, GET)))
        made.append(_most(f"get {shape.words}: time / shm copy", most, taken))
    return made


def _puts(of: Figures) -> list[Checked]:
    made = []
    for size in (4 * KIB, 64 * KIB):
        shape = Shape(size, 1, 1)
        peers = [figure.p50_s for figure in of.contestants(shape, WARM, PUT, Kind.PEER)]
        for name, ours in ((OURS, "put"), (POSTED, "post")):
            best = _over(_p50(of.of(name, shape, PUT)), min(peers, default=None))
            made.append(_most(f"{ours} {shape.words}: p50 / fastest peer", 1.0, best))
    for batch, least in ((64, 0.8), (1, 0.6)):
        shape = Shape(MIB, batch, 1)
        echo = _ratio(of.of(ECHO, shape, PUT))
        for name, ours, echoed in ((OURS, "put", echo), (POSTED, "post", None)):
            ratio = _ratio(of.of(name, shape, PUT))
            made.append(_least(f"{ours} {shape.words} / shm copy", least, ratio, echoed))
    return made


def _together(of: Figures) -> list[Checked]:
    four, one = Shape(MIB, 64, 4), Shape(MIB, 64, 1)
    ours, copy = of.of(OURS, four, GET), of.of(COPY_2, one, GET)
    ratio = ours.rate / copy.rate if ours is not None and copy is not None else None
    return [_least("get 1 MiB x 64, 4 clients together / 2-thread copy", 0.9, ratio)]


def _probed(probes: Mapping[str, float]) -> list[Checked]:
    bounds = ((MATCH_1000, 5.0, "ms"), (MATCH_4096, 15.0, "ms"), (LOOP_LAG, 5.0, "ms"))
    made = [Checked(name, bound, unit, False, probes.get(name)) for name, bound, unit in bounds]
    return [*made, Checked(PRIVATE_MEMORY, 150.0, "MB", False, probes.get(PRIVATE_MEMORY))]


def _fastest(of: Figures, shape: Shape, verb: str) -> float | None:
    """Of the ways that make a private copy."""
    times = [
        figure.p50_s
        for figure in of.contestants(shape, WARM, verb, Kind.OURS)
        if figure.contestant != VIEWS
    ]
    return min(times, default=None)


def _echoed(echo: float | None, hashed: float | None) -> float | None:
    """Of an echo and the copy with its checksum, to that copy: both ratios are to the plain copy, whose time is 1."""
    if not echo or not hashed:
        return None
    return 1 / hashed / (1 / hashed + 1 / echo - 1)


def _least(name: str, bound: float, measured: float | None, echoed: float | None = None) -> Checked:
    return Checked(name, bound, "x", True, measured, echoed)


def _most(name: str, bound: float, measured: float | None) -> Checked:
    return Checked(name, bound, "x", False, measured)


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _ratio(figure: Figure | None) -> float | None:
    return figure.ratio if figure is not None else None


def _p50(figure: Figure | None) -> float | None:
    return figure.p50_s if figure is not None else None
