"""What a user may set for a connector: one place, read from the JSON that the engine was given."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvstored.errors import ConfigError, InvalidArgument
from kvstored.units import parse_duration, parse_size


@dataclass(frozen=True, slots=True)
class ConnectorOptions:
    """Defaults suit a daemon on the same host.

    `revision`, `model`: in place of the weights fingerprint and the engine's model name. `supersede`: take over the name from a
    namespace that describes its KV differently, instead of being refused.
    """

    address: str | None = None
    model: str = ""
    revision: str = ""
    tenant: str = "default"
    supersede: bool = False
    lookup_s: float = 0.2
    """A lookup that has no answer by then is a miss."""
    load_s: float = 5.0
    """What is not loaded by then is computed; the wait for the daemon's messages within it."""
    store_s: float = 10.0
    probe_s: float = 1.0
    """Each try of the background to reach a daemon that was away."""
    queue_bytes: int = 256 << 20
    """Memory for blocks on their way to the daemon; what does not fit is not stored."""
    verify: bool = True
    """Compare the checksum of every block that is loaded."""

    @classmethod
    def parsed(cls, given: Mapping[str, object]) -> "ConnectorOptions":
        """From JSON: durations and sizes as text with a unit ("200ms", "1GiB"). Raises ConfigError with the name and an example."""
        known = {_key(field.name): field.name for field in fields(cls)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ConfigError(
                f"unknown options of the connector names={unknown} known={sorted(known)}"
            )
        made = cls(**{known[key]: _value(known[key], value) for key, value in given.items()})  # type: ignore[arg-type]  # _value checks each
        if min(made.lookup_s, made.load_s, made.store_s, made.probe_s) <= 0:
            raise ConfigError('durations of the connector are positive: "lookup": "200ms"')
        return made


def _key(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_s")


def _value(name: str, given: object) -> object:
    try:
        if name.endswith("_s"):
            return parse_duration(_text(name, given))
        if name.endswith("_bytes"):
            return parse_size(_text(name, given))
    except InvalidArgument as error:
        raise ConfigError(f"option of the connector name={_key(name)}: {error}") from error
    if name in ("supersede", "verify"):
        if not isinstance(given, bool):
            raise ConfigError(
                f"option of the connector is true or false name={name} value={given!r}"
            )
        return given
    return _text(name, given)


def _text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise ConfigError(f"option of the connector is text name={_key(name)} value={given!r}")
    return given
