"""Types of settings: how each value is written, checked and shown again, exactly."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BeforeValidator, Field, PlainSerializer

from kvstored import units
from kvstored.errors import InvalidArgument

Number = TypeVar("Number", int, float)

_DEVICE = re.compile(r"(host:)?[0-9]{1,2}")

SOCKET_PATH_MAX = 107
"""Bytes of a Unix socket's path that the kernel takes."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens: a TCP host and port, or the path of a Unix socket (then the port is 0)."""

    host: str
    port: int
    path: str = ""

    @property
    def is_loopback(self) -> bool:
        if self.path or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _size(value: object) -> int:
    return _quantity(value, units.parse_size, example="64GiB (or 64GB)")


def _duration(value: object) -> float:
    return _quantity(value, units.parse_duration, example="30s (or 10min)")


def _quantity(value: object, parse: Callable[[str], Number], *, example: str) -> Number:
    if not isinstance(value, str):
        raise ValueError(f"without a unit: value={value!r}; write for example {example}")
    try:
        return parse(value)
    except InvalidArgument as error:
        raise ValueError(str(error)) from error


def _auto_size(value: object) -> int | None:
    return None if value in ("auto", None) else _size(value)


def _mode(value: object) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError(f'not a file mode in quotes: value={value!r}; write for example "0660"')
    return int(value, 8)


def _path(value: object) -> Path:
    if not isinstance(value, str | Path) or not str(value):
        raise ValueError(f"not a path: value={value!r}")
    return Path(value).expanduser().absolute()


def _optional_path(value: object) -> Path | None:
    return None if value in ("off", None) else _path(value)


def _socket_path(value: object) -> Path:
    path = _path(value)
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_MAX:
        raise ValueError(
            f"path of a unix socket is too long: bytes={length} max={SOCKET_PATH_MAX} path={path}; "
            "choose a short one, for example /run/kvstored/kvstored.sock"
        )
    return path


def _endpoint(value: object) -> Endpoint | None:
    if value in ("off", None):
        return None
    text = str(value)
    if text.startswith("unix:"):
        return Endpoint("", 0, str(_socket_path(text.removeprefix("unix:").removeprefix("//"))))
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"not an address: value={value!r}; write for example 127.0.0.1:7439, unix:/run/kvstored/grpc.sock or off"
        )
    return Endpoint(host, int(port))


def _grpc_endpoint(value: object) -> Endpoint | None:
    endpoint = _endpoint(value)
    if endpoint is not None and not endpoint.is_loopback:
        raise ValueError(
            f"listening beyond loopback needs TLS, which this version does not have: value={value!r}; "
            "write for example 127.0.0.1:7439 or unix:/run/kvstored/grpc.sock"
        )
    return endpoint


def _endpoint_text(endpoint: Endpoint | None) -> str:
    return "off" if endpoint is None else str(endpoint)


OBJECTIVES = ("hit-rate", "transfer", "decode", "footprint")


def _objectives(value: object) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    given = tuple(str(name).strip() for name in names) if isinstance(names, list | tuple) else ()
    if sorted(given) != sorted(OBJECTIVES):
        raise ValueError(f"not an order of {','.join(OBJECTIVES)}: value={value!r}")
    return given


Objectives = Annotated[
    tuple[str, ...], BeforeValidator(_objectives), PlainSerializer(",".join, return_type=str)
]
GUESSES = ("selection", "session", "sibling")


def _guesses(value: object) -> tuple[str, ...]:
    if value in ("off", None):
        return ()
    names = value.split(",") if isinstance(value, str) else value
    given = tuple(str(name).strip() for name in names) if isinstance(names, list | tuple) else ("",)
    if not set(given) <= set(GUESSES) or len(set(given)) < len(given):
        raise ValueError(f"not some of {','.join(GUESSES)}, or off: value={value!r}")
    return given


Guesses = Annotated[
    tuple[str, ...],
    BeforeValidator(_guesses),
    PlainSerializer(lambda names: ",".join(names) or "off", return_type=str),
]


def _devices(value: object) -> tuple[str, ...]:
    if isinstance(value, list | tuple):
        names = tuple(str(name) for name in value)
    elif isinstance(value, str):
        names = () if value == "off" else tuple(name.strip() for name in value.split(","))
    else:
        raise ValueError(f"not a list of devices: value={value!r}; write for example 0,1")
    wrong = [name for name in names if not _DEVICE.fullmatch(name)]
    if wrong:
        raise ValueError(f"no such device: value={wrong[0]!r}; write for example 0,1 or off")
    if len(set(names)) < len(names):
        raise ValueError(f"a device is named twice: value={','.join(names)}")
    return names


def _devices_text(names: tuple[str, ...]) -> str:
    return ",".join(names) or "off"


Devices = Annotated[
    tuple[str, ...], BeforeValidator(_devices), PlainSerializer(_devices_text, return_type=str)
]
Size = Annotated[int, BeforeValidator(_size), PlainSerializer(units.format_size)]
AutoSize = Annotated[
    int | None,
    BeforeValidator(_auto_size),
    PlainSerializer(lambda size: "auto" if size is None else units.format_size(size)),
]
Duration = Annotated[float, BeforeValidator(_duration), PlainSerializer(units.format_duration)]
Share = Annotated[float, Field(ge=0, le=1)]
Mode = Annotated[int, BeforeValidator(_mode), PlainSerializer(lambda mode: f"{mode:04o}")]
AnyPath = Annotated[Path, BeforeValidator(_path), PlainSerializer(str)]
OptionalPath = Annotated[
    Path | None,
    BeforeValidator(_optional_path),
    PlainSerializer(lambda path: "off" if path is None else str(path)),
]
SocketPath = Annotated[Path, BeforeValidator(_socket_path), PlainSerializer(str)]
Listen = Annotated[Endpoint | None, BeforeValidator(_endpoint), PlainSerializer(_endpoint_text)]
GrpcListen = Annotated[
    Endpoint | None, BeforeValidator(_grpc_endpoint), PlainSerializer(_endpoint_text)
]
