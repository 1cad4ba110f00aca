"""Types of flags and arguments: sizes, rates and durations with their units, pins."""

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


class _Pin(click.ParamType[int]):
    name = "pin"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        text = str(value)
        if not text.isdecimal() or not int(text):
            self.fail(
                f"{text!r} is no pin; a pin is the number that kvstored pin printed, kvstored leases lists all"
            )
        return int(text)


PIN = _Pin()
