"""What a connector relies on of an engine, compared with the installed release: what has changed is named."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any


def differences(owner: Any, expected: Mapping[str, Iterable[str]]) -> list[str]:
    """Of methods of a class, or functions of a module: their parameters in order, without self."""
    found: list[str] = []
    for name, wanted in expected.items():
        method = inspect.getattr_static(owner, name, None)
        if method is None:
            found.append(f"{owner.__name__}.{name} is gone")
            continue
        called = method.__func__ if isinstance(method, staticmethod | classmethod) else method
        has = [each for each in inspect.signature(called).parameters if each not in ("self", "cls")]
        if has != list(wanted):
            found.append(f"{owner.__name__}.{name}: parameters {list(wanted)} are now {has}")
    return found


def missing(owner: Any, names: Iterable[str]) -> list[str]:
    """Fields of a dataclass, members of an enumeration, attributes of a class or module."""
    fields = set(getattr(owner, "__dataclass_fields__", ()))
    gone = [name for name in names if name not in fields and not hasattr(owner, name)]
    return [f"{owner.__name__}.{name} is gone" for name in gone]


def abstract_beyond(owner: Any, ours: type) -> list[str]:
    """Abstract methods of the base that our class does not have."""
    wanted: set[str] = getattr(owner, "__abstractmethods__", frozenset())
    return [
        f"{owner.__name__}.{name} is new and abstract"
        for name in sorted(wanted & set(getattr(ours, "__abstractmethods__", ())))
    ]


def overridden(base: Any, ours: type) -> list[str]:
    """Methods of ours that take other parameters than those that they override."""
    found: list[str] = []
    for name, method in vars(ours).items():
        before = inspect.getattr_static(base, name, None)
        if name.startswith("_") or not inspect.isfunction(method) or not inspect.isfunction(before):
            continue
        wanted = list(inspect.signature(before).parameters)
        has = list(inspect.signature(method).parameters)
        if wanted != has:
            found.append(f"{ours.__name__}.{name}{has} overrides {base.__name__}.{name}{wanted}")
    return found
