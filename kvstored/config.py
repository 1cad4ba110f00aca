"""Every setting of the daemon, once (those of a section in sections.py): type, unit, default, bound and one sentence; and where its value came from.

A key such as `dram.capacity` comes from a flag, else `KVSTORED_DRAM_CAPACITY`, else the TOML file, else its default. This is the one module
that reads the environment. Objects (clock, tiers, registry) are never settings.
"""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from kvstored.errors import ConfigError
from kvstored.fields import (
    OBJECTIVES,
    AnyPath,
    Endpoint,
    GrpcListen,
    Listen,
    Mode,
    Objectives,
    SocketPath,
)
from kvstored.sections import (
    BulkTls,
    Disk,
    Dram,
    Feedback,
    Hbm,
    Limits,
    Log,
    Prefetch,
    Section,
    Signals,
    Wire,
    key_of,
)

ENVIRONMENT_PREFIX = "KVSTORED_"
_FOREIGN = re.compile(r"KVSTORED_(CONFIG|NATIVE|SERVICE_\w+|PORT|PORT_\w+)")
"""Not settings: the file's path, what clients read, and what Kubernetes puts into every container beside a service named kvstored."""


PolicyName = Literal[
    "combined",
    "prefix-tree",
    "tiered-lru",
    "attention",
    "speculative",
    "discard",
    "lru",
    "composite",
    "article",
    "lfu",
    "gdsf",
    "s3fifo",
    "arc",
    "wa",
]
"""As in core/bundles.py: a test compares them."""


class Config(Section):
    state_dir: AnyPath = Field(
        description="directory that one daemon owns: lock, records, blocks on disk"
    )
    socket: SocketPath = Field(description="unix socket of the local channel")
    socket_mode: Mode = Field(default=0o600, description="who may connect to it")
    listen: GrpcListen = Field(
        default=Endpoint("127.0.0.1", 7439), description="gRPC: HOST:PORT, unix:PATH or off"
    )
    bulk_listen: Listen = Field(
        default=Endpoint("127.0.0.1", 0),
        description="TCP beside gRPC for bytes of remote clients: HOST:PORT (port 0: any, clients are told) or off",
    )
    bulk_tls: BulkTls = Field(default=BulkTls(), description="TLS of the bulk channel")
    wire: Wire = Field(default=Wire(), description="bytes to and from remote clients")
    metrics_listen: Listen = Field(
        default=Endpoint("127.0.0.1", 7440),
        description="/metrics, /healthz and /readyz: HOST:PORT, unix:PATH or off",
    )
    policy: PolicyName = Field(
        default="combined",
        description="which block is evicted first, and by which signals (docs/policies.md)",
    )
    objectives: Objectives = Field(
        default=OBJECTIVES,
        description="what scheduling is for, first things first (docs/scheduling.md)",
    )
    signals: Signals = Field(default=Signals(), description="single signals of the policy")
    dram: Dram = Field(default=Dram(), description="the tier in shared memory")
    disk: Disk = Field(description="the tier on NVMe")
    hbm: Hbm = Field(default=Hbm(), description="the tier on GPUs")
    feedback: Feedback = Field(
        default=Feedback(), description="what engines report of attention (docs/scheduling.md)"
    )
    prefetch: Prefetch = Field(default=Prefetch(), description="loading ahead of need")
    limits: Limits = Field(default=Limits(), description="bounds on what callers hold and wait for")
    log: Log = Field(default=Log(), description="log lines")

    @model_validator(mode="after")
    def _bulk_is_reachable_in_safety(self) -> Self:
        listen, tls = self.bulk_listen, self.bulk_tls
        if listen and listen.path:
            raise ValueError(f"setting bulk_listen: it is HOST:PORT or off: value={listen}")
        if listen and not listen.is_loopback and tls.certificate is None:
            remedy = "set bulk_tls.certificate and bulk_tls.key"
            raise ValueError(
                f"setting bulk_listen: listening beyond loopback needs TLS: value={listen}; {remedy}"
            )
        if tls.key is not None and tls.certificate is None:
            raise ValueError("setting bulk_tls.key: it needs bulk_tls.certificate")
        return self

    def to_json(self) -> str:
        """For the daemon's own processes: `parse` gives an equal Config back."""
        return self.model_dump_json(by_alias=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """One key with its effective value as text, and where that came from: `flag`, `environment NAME`, `file PATH` or `default`."""

    key: str
    value: str
    origin: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Loaded:
    config: Config
    origins: Mapping[str, str]
    """By key; a key that is not there has its default."""

    def settings(self) -> list[Setting]:
        values, defaults = dict(_texts(self.config)), _default_texts()
        return [
            Setting(key, values[key], self.origins.get(key, "default"), defaults[key], meaning)
            for key, meaning in _MEANINGS.items()
        ]


def load(
    *,
    flags: Mapping[str, str | None] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Loaded:
    """Flags (by key; None is not given) over the environment over the file over defaults; `ConfigError` names key, origin and a remedy.

    Without `file`: the one that KVSTORED_CONFIG names, else $XDG_CONFIG_HOME/kvstored/kvstored.toml, else /etc/kvstored/kvstored.toml, where they exist.
    """
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    layers: list[Mapping[str, tuple[object, str]]] = [
        _from_file(_chosen_file(file, environ)),
        _from_environment(environ),
        {key: (value, "flag") for key, value in (flags or {}).items() if value is not None},
    ]
    for layer in layers:
        for key, (value, origin) in layer.items():
            if key not in _MEANINGS:
                raise ConfigError(_unknown(key, origin))
            values[key], origins[key] = value, origin
    try:
        return Loaded(Config.model_validate(_nested(_defaults(values, environ) | values)), origins)
    except ValidationError as error:
        raise ConfigError(_refusal(error, origins)) from error


def parse(text: str) -> Config:
    """What `Config.to_json` wrote."""
    return Config.model_validate(json.loads(text))


def meaning(key: str) -> str:
    return _MEANINGS[key]


def environment_name(key: str) -> str:
    return ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def _chosen_file(file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if file is not None:
        return file
    if named := environ.get("KVSTORED_CONFIG"):
        return Path(named)
    places = (_xdg(environ, "XDG_CONFIG_HOME", ".config") / "kvstored", Path("/etc/kvstored"))
    return next((path for place in places if (path := place / "kvstored.toml").is_file()), None)


def _from_file(path: Path | None) -> dict[str, tuple[object, str]]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"configuration file cannot be read: path={path} error={error}"
        ) from error
    return {key: (value, f"file {path}") for key, value in _flat(table, "")}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[object, str]]:
    keys = {environment_name(key): key for key in _MEANINGS}
    found: dict[str, tuple[object, str]] = {}
    for name, value in sorted(environ.items()):
        if name.startswith(ENVIRONMENT_PREFIX) and not _FOREIGN.fullmatch(name):
            if name not in keys:
                raise ConfigError(_unknown(name, "environment", sorted(keys)))
            found[keys[name]] = (value, f"environment {name}")
    return found


def _defaults(values: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, object]:
    """Paths whose default depends on where this runs and on each other."""
    state_dir = Path(
        str(values.get("state_dir", _xdg(environ, "XDG_STATE_HOME", ".local/state") / "kvstored"))
    )
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    beside = Path(runtime) / "kvstored" if runtime.startswith("/") else state_dir
    return {
        "state_dir": state_dir,
        "socket": beside / "kvstored.sock",
        "disk.path": state_dir / "disk",
    }


def _xdg(environ: Mapping[str, str], name: str, below_home: str) -> Path:
    """A relative path in such a variable is invalid and ignored, says its specification."""
    named = environ.get(name, "")
    home = environ.get("HOME") or "~"
    return Path(named) if named.startswith("/") else Path(home).expanduser() / below_home


def _flat(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and key not in _MEANINGS:
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _nested(values: Mapping[str, object]) -> dict[str, object]:
    nested: dict[str, object] = {}
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, dot, name = key.rpartition(".")
        if dot:
            sections.setdefault(section, {})[name] = value
        else:
            nested[name] = value
    return nested | sections


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{key_of(name)}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys(field.annotation, f"{key}.")
        else:
            yield key, field.description or ""


def _texts(config: Config) -> Iterator[tuple[str, str]]:
    return (
        (key, str(value)) for key, value in _flat(config.model_dump(mode="json", by_alias=True), "")
    )


def _default_texts() -> dict[str, str]:
    """As text with the variables that paths depend on left in."""
    state = "$XDG_STATE_HOME/kvstored"
    plain = Config.model_validate(_nested({"state_dir": "/", "socket": "/s", "disk.path": "/d"}))
    paths = {
        "state_dir": state,
        "socket": "$XDG_RUNTIME_DIR/kvstored/kvstored.sock",
        "disk.path": f"{state}/disk",
    }
    return dict(_texts(plain)) | paths


def _unknown(name: str, origin: str, known: Sequence[str] = ()) -> str:
    near = difflib.get_close_matches(name, known or [*_MEANINGS], n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else "kvstored config lists all"
    return f"unknown setting: name={name} from={origin}; {hint}"


def _refusal(error: ValidationError, origins: Mapping[str, str]) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not key:  # of several settings: the message names them
        return message
    if key not in _MEANINGS:  # of a section
        return f"setting {key}: {message}"
    if "value=" not in message:
        message += f": value={first['input']}"
    default = _default_texts().get(key)
    facts = f"{message}; from={origins.get(key, 'default')}"
    return f"setting {key}: {facts}" + (f" default={default}" if default else "")


_MEANINGS = dict(_keys(Config))
