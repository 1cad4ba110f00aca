"""How one kind of block is coded, as a value: what its elements are, how they lie, and the steps that its sections go through in turn."""

from dataclasses import dataclass, replace
from enum import IntEnum

from kvstored.codec.elements import FORMS, Element
from kvstored.errors import InvalidArgument

SECTION_BYTES = 128 << 10
SECTION_BYTES_MAX = 64 << 20


class Method(IntEnum):
    """Stored with every section: numbers are never reused. From 16 on methods are lossy."""

    RAW = 0
    ZSTD = 1
    PLANES = 2
    SYMBOLS = 3
    RESIDUAL = 4
    TOKENS = 5
    LANES = 6
    EXPONENTS = 7
    UNIFORM = 16
    ROTATED = 17
    BOUNDED = 18

    @property
    def is_lossy(self) -> bool:
        return self >= Method.UNIFORM


@dataclass(frozen=True, slots=True)
class Step:
    """One method and its parameter: classes of columns (SYMBOLS), bins (RESIDUAL, which is read only), stages (LANES), rows between key rows (TOKENS),
    level (ZSTD); see `lossy` for the others."""

    method: Method
    parameter: int = 0

    def __str__(self) -> str:
        name = self.method.name.lower()
        return f"{name}:{self.parameter}" if self.parameter else name


RAW = Step(Method.RAW)
AGAINST = Step(Method.LANES, 5)
AGAINST_SMALL = Step(Method.LANES, 10)
"""Sections of P and B frames. A stage more is 0.3 to 0.9 % fewer bytes and a fifteenth more time."""
AGAINST_SECTION_BYTES = 768 << 10
"""P and B frames have as many of the plan's sections in one: their many short steps cost less a byte then."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Section i is coded by step i modulo their number, or by `against` where a frame has references. `rows`, `columns`: tokens and channels
    of a tile, 0 where not known.

    `ratio`: what the sample gave; 0 where nothing was sampled.
    """

    element: Element
    steps: tuple[Step, ...] = (RAW,)
    rows: int = 0
    columns: int = 0
    section_bytes: int = SECTION_BYTES
    against: Step = AGAINST
    ratio: float = 0.0

    def __post_init__(self) -> None:
        width = FORMS[self.element].width_bytes
        if not 0 < self.section_bytes <= SECTION_BYTES_MAX or self.section_bytes % width:
            raise InvalidArgument(
                f"section is out of range: section_bytes={self.section_bytes} max={SECTION_BYTES_MAX} {width=}"
            )
        if not self.steps or not all(0 <= step.parameter < 256 for step in self.steps):
            raise InvalidArgument(f"plan has no usable steps: steps={self.steps}")

    @property
    def is_raw(self) -> bool:
        return all(step.method is Method.RAW for step in self.steps)

    @property
    def is_lossy(self) -> bool:
        return any(step.method.is_lossy for step in self.steps)

    def section_bytes_for(self, references: int) -> int:
        """Of a frame with so many references."""
        if not references or self.is_lossy:
            return self.section_bytes
        return self.section_bytes * max(AGAINST_SECTION_BYTES // self.section_bytes, 1)

    def for_share(self, plain_bytes: int, full_bytes: int) -> "Plan":
        """For a block with fewer tokens: tiles have fewer rows then, and a section as many tiles as before."""
        rows, rest = divmod(self.rows * plain_bytes, full_bytes)
        if plain_bytes == full_bytes or rest or not rows:
            return self
        tile_bytes = self.columns * FORMS[self.element].width_bytes
        tiles = max(self.section_bytes // (self.rows * tile_bytes), 1)
        return replace(self, rows=rows, section_bytes=tiles * rows * tile_bytes)

    def __str__(self) -> str:
        """As `stat` shows it: `bf16 256x64 symbols:4,symbols 1.53x`."""
        layout = f" {self.rows}x{self.columns}" if self.columns else ""
        steps = ",".join(map(str, self.steps))
        ratio = f" {self.ratio:.2f}x" if self.ratio else ""
        return f"{self.element.name.lower()}{layout} {steps}{ratio}"


def tile_of(count: int, rows: int, columns: int) -> tuple[int, int, int]:
    """Tiles, rows and columns of `count` elements: whole tiles, else one tile of whole rows, else one row of unknown order."""
    if columns > 1 and count and count % columns == 0:
        if rows > 1 and count % (rows * columns) == 0:
            return count // (rows * columns), rows, columns
        return 1, count // columns, columns
    return 1, 1, count
