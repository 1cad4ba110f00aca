"""Types of flags: sizes, rates and durations with their units."""

from collections.abc import Callable

import click

from kvstored import units
from kvstored.errors import InvalidArgument


class _Quantity(click.ParamType[float]):
    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        if not isinstance(value, str):
            assert isinstance(value, int | float), value
            return value
        try:
            return self._parse(value)
        except InvalidArgument as error:
            self.fail(str(error), param, ctx)


SIZE = _Quantity("size", units.parse_size)
RATE = _Quantity("rate", units.parse_rate)
DURATION = _Quantity("duration", units.parse_duration)
