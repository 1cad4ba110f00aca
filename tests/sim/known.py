"""The known hit ratios of leaf-first LRU on the real traces (../shared/traces/README.md), as cases."""

from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).parents[3] / "shared" / "traces"


@dataclass(frozen=True)
class Known:
    """Capacity None: without bound. `ratio` has four decimals."""

    file: str
    capacity_blocks: int | None
    ratio: float

    def __str__(self) -> str:
        return f"{self.file.split('.')[0]}-{self.capacity_blocks or 'infinite'}"


SHARES = (0.01, 0.02, 0.05, 0.10, 0.20, 0.50)


def _jsonl(name: str, ratios: dict[int | None, float]) -> list[Known]:
    return [Known(f"mooncake_{name}.jsonl.gz", blocks, ratio) for blocks, ratio in ratios.items()]


def _kvt1(name: str, unique: int, infinite: float, *ratios: float) -> list[Known]:
    shares = zip(SHARES, ratios, strict=True)
    bounded = [Known(f"{name}.kvt.gz", int(share * unique), ratio) for share, ratio in shares]
    return [Known(f"{name}.kvt.gz", None, infinite), *bounded]


CONVERSATION = _jsonl(
    "conversation",
    {None: 0.3664, 50_000: 0.3546, 30_000: 0.3257, 10_000: 0.2116, 3_000: 0.0653, 1_000: 0.0445},
)
SYNTHETIC = _jsonl(
    "synthetic", {None: 0.6396, 30_000: 0.6242, 10_000: 0.4239, 3_000: 0.1906, 1_000: 0.0841}
)
CONV = _kvt1("mooncake_conv", 170_899, 0.3819, 0.0544, 0.0801, 0.2022, 0.2882, 0.3585, 0.3785)
WEKA = _kvt1("weka_dev", 168_730, 0.9635, 0.1290, 0.4187, 0.8601, 0.9390, 0.9575, 0.9631)

KNOWN = [*CONVERSATION, *SYNTHETIC, *CONV, *WEKA]
