"""The figures of a run as one PNG. Needs matplotlib (the extra `bench`)."""

from collections.abc import Sequence
from pathlib import Path

from bench.peers.contestants import CONTESTANTS, Kind
from bench.peers.figures import Figure
from bench.peers.plan import COLD, GET, WARM, size_words

_STYLES = {Kind.LIMIT: ":", Kind.PEER: "--", Kind.OURS: "-"}


def plot(figures: Sequence[Figure], path: Path) -> None:
    """One panel a verb, medium, batch and number of clients: GB/s over block size."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    panels = sorted(
        {(f.medium, f.shape.batch, f.shape.clients, f.verb) for f in figures},
        key=lambda p: (p[0] == COLD, p[1], p[2], p[3] == GET),
    )
    columns = 4
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(5 * columns, 4 * lines + 1), squeeze=False, layout="constrained"
    )
    palette = plt.get_cmap("tab20")
    colours = {each.name: palette(i % 20) for i, each in enumerate(CONTESTANTS)}
    for place, (medium, batch, clients, verb) in zip(axes.flat, panels, strict=False):
        for each in CONTESTANTS:
            points = sorted(
                (f.shape.block_bytes, f.rate / 1e9)
                for f in figures
                if (f.contestant, f.medium, f.shape.batch, f.shape.clients, f.verb)
                == (each.name, medium, batch, clients, verb)
            )
            if points:
                sizes, rates = zip(*points, strict=True)
                place.plot(
                    sizes,
                    rates,
                    _STYLES[each.kind],
                    color=colours[each.name],
                    marker="o",
                    markersize=3,
                    label=each.name,
                )
        place.set_xscale("log", base=2)
        place.set_yscale("log")
        ticks = sorted({f.shape.block_bytes for f in figures})
        place.set_xticks(ticks, [size_words(size) for size in ticks], rotation=30)
        place.set_title(f"{verb}, {_words(medium)}, batch {batch}, clients {clients}", fontsize=10)
        place.set_ylabel("GB/s")
        place.grid(visible=True, alpha=0.3)
    for place in axes.flat[len(panels) :]:
        place.axis("off")
    handles = {
        label: line
        for place in axes.flat
        for line, label in zip(*place.get_legend_handles_labels(), strict=True)
    }
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _words(medium: str) -> str:
    return {WARM: "warm", COLD: "from disk"}[medium]
