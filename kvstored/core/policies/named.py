"""Policies by name."""

from collections.abc import Callable

from kvstored.core.policies.arc import Arc
from kvstored.core.policies.article import Article
from kvstored.core.policies.base import Ledger, Policy
from kvstored.core.policies.composite import Composite
from kvstored.core.policies.frequency import Gdsf, Lfu
from kvstored.core.policies.lru import Lru
from kvstored.core.policies.s3fifo import S3Fifo
from kvstored.core.policies.wa import Wa

_MAKERS: dict[str, Callable[[Ledger], Policy]] = {
    "lru": Lru,
    "composite": Composite,
    "article": Article,
    "lfu": Lfu,
    "gdsf": Gdsf,
    "s3fifo": S3Fifo,
    "arc": Arc,
    "wa": Wa,
}
POLICIES = tuple(_MAKERS)


def policy_named(name: str, ledger: Ledger) -> Policy:
    return _MAKERS[name](ledger)
