"""The demo as the picture of README.md: time to the first token of each question, without and with."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

from examples.smollm2.demo import Outcome

COLOURS = {"": "#9aa0a6", "dram": "#1a73e8", "nvme": "#e8710a"}
NAMES = {"": "computed", "dram": "from DRAM", "nvme": "from NVMe"}
WITHOUT = "#dadce0"


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    mpl.use("agg")
    figure, axes = plt.subplots(figsize=(9.5, 0.72 * len(outcomes) + 1.3))
    for i, each in enumerate(outcomes):
        axes.barh(i - 0.19, each.without_s, 0.36, color=WITHOUT)
        main = max(each.tokens_by_tier, key=lambda tier: each.tokens_by_tier[tier], default="")
        computed = 2 * sum(each.tokens_by_tier.values()) < each.prompt_tokens
        axes.barh(i + 0.19, each.with_s, 0.36, color=COLOURS["" if computed else main])
        loaded = f"{sum(each.tokens_by_tier.values())} of {each.prompt_tokens} tokens loaded"
        axes.text(
            each.with_s,
            i + 0.19,
            f"  {each.with_s:.2f} s, {each.ratio:.1f} times; {loaded}",
            va="center",
            size=8.5,
        )
        axes.text(each.without_s, i - 0.19, f"  {each.without_s:.2f} s", va="center", size=8.5)
    axes.set_yticks(range(len(outcomes)), [each.title for each in outcomes], size=9.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.18 * max(max(each.without_s, each.with_s) for each in outcomes))
    axes.set_xlabel("seconds to the first token")
    axes.set_title(
        "SmolLM2-135M on one CPU core, one document, greedy text and KV bytes the same", size=10.5
    )
    legend = [Patch(color=WITHOUT, label="without kvstored")]
    legend += [Patch(color=COLOURS[tier], label=f"with: {NAMES[tier]}") for tier in NAMES]
    axes.legend(handles=legend, loc="lower right", fontsize=8.5, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
