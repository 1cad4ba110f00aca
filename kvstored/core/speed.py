"""How long work of a size takes, learned from work that ended: a fixed part and a part by size.

A line through what was seen, weighted so that a small size says as much as a large one and with the older seen fading, plus two made-up
observations: so it has an answer before anything was seen, and where all of it had one size.
"""

from dataclasses import dataclass

FADE = 0.98
"""What an observation weighs when the next one comes: some fifty count."""
_PRIOR_WEIGHT = 0.5
_PRIOR_SIZE = 4 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds for a size: `fixed_s` + `size_s` x size."""

    fixed_s: float
    size_s: float

    def seconds(self, size: float) -> float:
        return self.fixed_s + self.size_s * size if size else 0.0


class Speed:
    """`prior`: what holds until something was seen."""

    def __init__(self, prior: Line) -> None:
        assert prior.fixed_s > 0 < prior.size_s, f"a time is above 0: {prior=}"
        self._prior = prior
        self._sums = [0.0] * 5
        self._line = prior
        self.seen = 0

    @property
    def line(self) -> Line:
        return self._line

    def note(self, size: float, seconds: float) -> None:
        """Work of this size took so long. What took no time at all, by a clock that stood still, says nothing."""
        if seconds <= 0 or size <= 0:
            return
        self.seen += 1
        self._sums = [FADE * each for each in self._sums]
        self._add(self._sums, size, seconds, 1.0)
        self._line = self._fitted()

    def _fitted(self) -> Line:
        sums = list(self._sums)
        for size in (_PRIOR_SIZE / 1024, _PRIOR_SIZE):
            self._add(sums, size, self._prior.seconds(size), _PRIOR_WEIGHT)
        n, x, y, xx, xy = sums
        slope = (n * xy - x * y) / (n * xx - x * x)  # above 0 below: the prior has two sizes
        fixed = (y - slope * x) / n
        if slope <= 0:
            return Line(y / n, self._prior.size_s / 1e3)
        return Line(fixed, slope) if fixed > 0 else Line(self._prior.fixed_s / 1e3, xy / xx)

    def _add(self, sums: list[float], size: float, seconds: float, weight: float) -> None:
        weight /= self._prior.seconds(size) ** 2
        for i, value in enumerate((1.0, size, seconds, size * size, size * seconds)):
            sums[i] += weight * value
