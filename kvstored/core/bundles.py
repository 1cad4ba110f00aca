"""Named bundles of eviction policy and signals, the same for daemon and replay, and their switches.

A bundle is an order of victims and what may change it. A switch turns one signal on or off, whatever the bundle says. The names of the policies
are bundles too: that order with every signal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kvstored.core.policies.named import POLICIES


class Signal(StrEnum):
    SINKS = "sinks"
    """First blocks are exempt up to their share of a tier."""
    HINTS = "hints"
    """What engines say of a request is heard."""
    DISK = "disk"
    """Blocks are written back to the slower tier, by their uses where it is full; without it eviction from memory drops them."""
    ATTENTION = "attention"
    """What engines report of attention moves victims back and forth; silent until one does."""
    GUESSES = "guesses"
    """What is likely to be asked for next comes up ahead of need."""


ALL = frozenset(Signal)


@dataclass(frozen=True, slots=True)
class Bundle:
    name: str
    policy: str
    signals: frozenset[Signal] = ALL

    def switched(self, switches: Mapping[Signal, bool]) -> "Bundle":
        on = {signal for signal, is_on in switches.items() if is_on}
        return replace(self, signals=(self.signals | on) - (switches.keys() - on))


_BUNDLES = (
    Bundle("combined", "composite"),
    Bundle("prefix-tree", "composite", frozenset({Signal.SINKS, Signal.DISK})),
    Bundle("tiered-lru", "lru", frozenset({Signal.SINKS, Signal.DISK})),
    Bundle("attention", "lru", frozenset({Signal.SINKS, Signal.DISK, Signal.ATTENTION})),
    Bundle("speculative", "lru", ALL - {Signal.ATTENTION}),
    Bundle("discard", "lru", frozenset()),
)
BUNDLES = tuple(bundle.name for bundle in _BUNDLES)
NAMES = BUNDLES + POLICIES
DEFAULT = BUNDLES[0]


def bundle_named(name: str) -> Bundle:
    """One of `NAMES`."""
    for bundle in _BUNDLES:
        if bundle.name == name:
            return bundle
    assert name in POLICIES, f"no bundle and no policy: {name}"
    return Bundle(name, name)
