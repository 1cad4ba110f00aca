"""The golden frames: how each was made. `python -m tests.codec.golden_frames` adds those that are missing; one that is there is never rewritten."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstored.codec import blocks, frame
from kvstored.codec.blocks import Known
from kvstored.codec.elements import Element
from kvstored.codec.lossy import BY_CHANNEL, Grid
from kvstored.codec.plan import Method, Plan, Step
from kvstored.codec.values import floats_of, words_of_floats
from tests.codec import real

FOLDER = Path(__file__).parent / "golden"
ROWS = 32


@dataclass(frozen=True)
class Golden:
    name: str
    plan: Plan
    references: int = 0
    is_old: bool = False
    """Nothing makes such a frame any more."""
    rows: int = ROWS

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.kvf1"

    def plain(self, variant: str = "b") -> NDArray[np.uint8]:
        """The first rows of V, as the plan's element."""
        words = real.bits(variant)[1, : self.rows].reshape(-1)
        element = self.plan.element
        if element not in {Element.BF16, Element.OPAQUE}:
            words = words_of_floats(floats_of(words, Element.BF16), element)
        return words.view(np.uint8)

    def known(self) -> list[Known]:
        """Two blocks of the same tokens: one after another prompt, and one between the two."""
        one = self.plain("a")
        both = [blocks.known(b"first" * 5, one), blocks.known(b"other" * 8, one ^ np.uint8(1))]
        return both[: self.references]


def _plan(element: Element, method: Method, parameter: int = 0) -> Plan:
    return Plan(
        element,
        (Step(method, parameter),),
        rows=ROWS,
        columns=64,
        section_bytes=2048,
        against=Step(Method.LANES, 7),
    )


def _flat(element: Element, method: Method) -> Plan:
    """Without a layout."""
    return replace(_plan(element, method), rows=0, columns=0)


BF16 = Element.BF16
WIDE = (BF16, Element.F16, Element.F32)
"""Elements of more than a byte."""
GOLDEN = (
    Golden("raw", _plan(Element.OPAQUE, Method.RAW)),
    Golden("zstd", _plan(Element.OPAQUE, Method.ZSTD, 3)),
    *(Golden(f"planes-{e.name.lower()}", _plan(e, Method.PLANES)) for e in Element),
    *(Golden(f"exponents-{e.name.lower()}", _plan(e, Method.EXPONENTS)) for e in WIDE),
    Golden("exponents-flat", _flat(BF16, Method.EXPONENTS)),
    *(Golden(f"symbols-{e.name.lower()}", _plan(e, Method.SYMBOLS)) for e in Element if e),
    Golden("symbols-classes", _plan(BF16, Method.SYMBOLS, 3)),
    Golden("tokens", _plan(BF16, Method.TOKENS)),
    Golden("tokens-keyed", _plan(BF16, Method.TOKENS, 8)),
    *(Golden(f"p-{e.name.lower()}", _plan(e, Method.RAW), 1, is_old=True) for e in Element),
    Golden("b", _plan(BF16, Method.RAW), 2, is_old=True),
    *(Golden(f"p-lanes-{e.name.lower()}", _plan(e, Method.RAW), 1) for e in Element),
    Golden("p-lanes-long", _plan(BF16, Method.RAW), 1, rows=256),
    Golden("b-lanes", _plan(BF16, Method.RAW), 2),
    *(Golden(f"uniform-{g.name.lower()}", _plan(BF16, Method.UNIFORM, g)) for g in Grid),
    Golden("uniform-by-channel", _plan(BF16, Method.UNIFORM, Grid.INT4 | BY_CHANNEL)),
    Golden("rotated", _plan(BF16, Method.ROTATED, 4)),
    Golden("bounded", _plan(BF16, Method.BOUNDED, 5), 1),
)
OLD_ZSTD = FOLDER / "zstd-before-kvf1.bin"
"""A frame of codec 1, which has no header: one zstd frame of V's first rows."""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    if not OLD_ZSTD.exists():
        OLD_ZSTD.write_bytes(frame.compressed([GOLDEN[0].plain()], 1).tobytes())
    for golden in GOLDEN:
        if not golden.path.exists() and not golden.is_old:
            made = blocks.encode(golden.plain(), golden.plan, golden.known())
            golden.path.write_bytes(made.tobytes())


if __name__ == "__main__":
    main()
