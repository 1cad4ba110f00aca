"""Policies by name."""

from collections.abc import Callable

from kvstored.core.policies.article import Article
from kvstored.core.policies.base import Ledger, Policy
from kvstored.core.policies.composite import Composite
from kvstored.core.policies.frequency import Gdsf, Lfu
from kvstored.core.policies.lru import Lru

_MAKERS: dict[str, Callable[[Ledger], Policy]] = {
    "lru": Lru,
    "composite": Composite,
    "article": Article,
    "lfu": Lfu,
    "gdsf": Gdsf,
}
POLICIES = tuple(_MAKERS)


def policy_named(name: str, ledger: Ledger) -> Policy:
    return _MAKERS[name](ledger)
