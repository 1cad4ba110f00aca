"""Namespaces: their canonical encoding, digest and alias, and the registry of those that are open.

Two blocks are interchangeable exactly when their namespaces have one digest. The encoding is a
table in docs/identity.md and a golden vector in the tests. The registry is pure books: the store
persists its JSON and tells the catalog what was opened, retired and removed.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvstored.core.types import (
    Access,
    CheckpointPolicy,
    GroupKind,
    GroupSpec,
    Layout,
    NamespaceId,
    NamespaceSpec,
)
from kvstored.core.validation import validated
from kvstored.errors import Corrupt, InvalidArgument, NamespaceMismatch, NoSpace, NotFound

__all__ = [
    "NAMESPACES_MAX",
    "Namespaces",
    "Opened",
    "alias",
    "canonical",
    "diff",
    "digest",
    "seed",
    "validated",
]

NAMESPACES_MAX = 1024
MAGIC = b"kvs.ns\x00\x01"
JSON_VERSION = 1

_Value = str | int | bool
_Fields = tuple[tuple[int, str, _Value], ...]


def canonical(spec: NamespaceSpec) -> bytes:
    """The bytes whose hash is the namespace's identity; of the validated spec, so that a default
    and its value are one.
    """
    whole = validated(spec)
    groups = [_encoded(_group_fields(group)) for group in whole.groups]
    packed = len(groups).to_bytes(4, "little")
    packed += b"".join(len(group).to_bytes(4, "little") + group for group in groups)
    return MAGIC + _encoded(_fields(whole)) + _field(GROUPS_TAG, packed)


def digest(spec: NamespaceSpec) -> bytes:
    return hashlib.sha256(canonical(spec)).digest()


def seed(namespace_digest: bytes) -> int:
    """Salt of the namespace's fingerprints."""
    return int.from_bytes(namespace_digest[:8], "little")


def alias(spec: NamespaceSpec) -> str:
    """How people name a namespace within their tenant."""
    return f"{spec.model}@{spec.revision}"


def diff(before: NamespaceSpec, after: NamespaceSpec) -> list[str]:
    """What differs in identity, one line a field; empty exactly when the digests are equal."""
    old, new = _facts(before), _facts(after)
    names = list(old) + [name for name in new if name not in old]
    return [
        f"{name}: {_shown(old.get(name))} -> {_shown(new.get(name))}"
        for name in names
        if old.get(name) != new.get(name)
    ]


@dataclass(frozen=True, slots=True)
class Opened:
    """`retired` ceased to be current by this call; `revived`: this one had been retired and is in
    use again.
    """

    layout: Layout
    created: bool
    revived: bool
    retired: tuple[Layout, ...]


@dataclass(frozen=True, slots=True)
class _Registered:
    layout: Layout
    is_retired: bool


class Namespaces:
    """Every namespace that has blocks or may get some. Ids are never reused, also not after a
    removal or a restart.

    A tenant's name points to one namespace: `model@revision` to the last one opened under it, the
    bare `model` to the first, until `supersede` moves both.
    """

    def __init__(self) -> None:
        self._registered: dict[bytes, _Registered] = {}
        self._names: dict[tuple[str, str], bytes] = {}
        self._next_id = 0

    def open(self, spec: NamespaceSpec, *, supersede: bool) -> Opened:
        """Idempotent for a digest that is known, whose accounting fields (flops, sink, recent,
        page) stay as first opened.

        Without `supersede` a retired namespace is revived unless another one has taken its name.
        """
        whole = validated(spec)
        namespace_digest = digest(whole)
        known = self._registered.get(namespace_digest)
        if not supersede:
            self._check_alias(whole, namespace_digest)
        if known is None and len(self._registered) >= NAMESPACES_MAX:
            raise NoSpace(f"too many namespaces, remove one first max={NAMESPACES_MAX}")
        # Nothing below raises.
        layout = known.layout if known else self._added(whole, namespace_digest)
        retired = self._supersede(layout) if supersede else ()
        self._names.setdefault((whole.tenant, alias(whole)), namespace_digest)
        current = self._names.setdefault((whole.tenant, whole.model), namespace_digest)
        entry = self._registered[namespace_digest]
        revived = entry.is_retired and current == namespace_digest
        if revived:
            self._registered[namespace_digest] = replace(entry, is_retired=False)
        return Opened(layout, created=known is None, revived=revived, retired=retired)

    def get(self, namespace_digest: bytes) -> Layout:
        return self._entry(namespace_digest).layout

    def is_retired(self, namespace_digest: bytes) -> bool:
        return self._entry(namespace_digest).is_retired

    def resolve(self, tenant: str, name: str) -> Layout:
        """The namespace that `model` or `model@revision` names now."""
        namespace_digest = self._names.get((tenant, name))
        if namespace_digest is None:
            raise NotFound(f"no namespace of this name is open tenant={tenant!r} name={name!r}")
        return self._registered[namespace_digest].layout

    def retire(self, namespace_digest: bytes) -> Layout:
        """Its blocks become first victims and its bare name free; it can still be read, and opening
        it again revives it.
        """
        entry = self._entry(namespace_digest)
        self._registered[namespace_digest] = replace(entry, is_retired=True)
        spec = entry.layout.spec
        self._unname(spec.tenant, spec.model, namespace_digest)
        return entry.layout

    def remove(self, namespace_digest: bytes) -> Layout:
        """Forgets it and frees its names; opened again it gets a new id."""
        layout = self._entry(namespace_digest).layout
        del self._registered[namespace_digest]
        self._unname(layout.spec.tenant, layout.spec.model, namespace_digest)
        self._unname(layout.spec.tenant, alias(layout.spec), namespace_digest)
        return layout

    def list(self) -> tuple[Layout, ...]:
        """All of them, retired ones too, in the order in which they were first opened."""
        return tuple(entry.layout for entry in self._registered.values())

    def __len__(self) -> int:
        return len(self._registered)

    def to_json(self) -> str:
        namespaces = [
            {
                "id": entry.layout.id,
                "digest": entry.layout.digest.hex(),
                "is_retired": entry.is_retired,
                "spec": asdict(entry.layout.spec),
            }
            for entry in self._registered.values()
        ]
        names = [[tenant, name, key.hex()] for (tenant, name), key in self._names.items()]
        whole = {"version": JSON_VERSION, "next_id": self._next_id}
        return json.dumps(whole | {"names": names, "namespaces": namespaces}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Namespaces":
        """The registry that `to_json` wrote; Corrupt for anything else, also where a spec no longer
        hashes to its digest.
        """
        try:
            return cls._parsed(json.loads(text))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            cause = f"{type(error).__name__}: {error}"  # the repr of some has the whole file
            raise Corrupt(f"namespace registry cannot be read error={cause}") from error
        except InvalidArgument as error:
            raise Corrupt(f"namespace registry holds an impossible namespace: {error}") from error

    @classmethod
    def _parsed(cls, whole: Any) -> "Namespaces":  # Any: JSON, checked field by field below
        if whole["version"] != JSON_VERSION:
            raise ValueError(f"version={whole['version']} known={JSON_VERSION}")
        registry = cls()
        for row in whole["namespaces"]:
            layout = _layout(NamespaceId(int(row["id"])), _spec(row["spec"]))
            if layout.digest.hex() != row["digest"] or layout.digest in registry._registered:
                raise ValueError(f"digest={row['digest']} hashes_to={layout.digest.hex()}")
            registry._registered[layout.digest] = _Registered(layout, bool(row["is_retired"]))
        for tenant, name, key in whole["names"]:
            spec = registry._registered[bytes.fromhex(key)].layout.spec
            if spec.tenant != tenant or name not in (spec.model, alias(spec)):
                raise ValueError(f"name={name!r} of another namespace")
            registry._names[tenant, name] = bytes.fromhex(key)
        ids = [layout.id for layout in registry.list()]
        registry._next_id = int(whole["next_id"])
        if len(set(ids)) != len(ids) or any(not 0 <= i < registry._next_id for i in ids):
            raise ValueError(f"ids={ids} next_id={registry._next_id}")
        return registry

    def _check_alias(self, spec: NamespaceSpec, namespace_digest: bytes) -> None:
        holder = self._names.get((spec.tenant, alias(spec)))
        if holder is None or holder == namespace_digest or namespace_digest in self._registered:
            return
        lines = diff(self._registered[holder].layout.spec, spec)
        raise NamespaceMismatch(
            f"this name is open with another identity alias={alias(spec)!r} tenant={spec.tenant!r};"
            " give this one another revision, or supersede the open one; open -> asked: "
            + "; ".join(lines)
        )

    def _added(self, spec: NamespaceSpec, namespace_digest: bytes) -> Layout:
        layout = _layout(NamespaceId(self._next_id), spec)
        assert layout.digest == namespace_digest
        self._next_id += 1
        self._registered[namespace_digest] = _Registered(layout, is_retired=False)
        return layout

    def _supersede(self, layout: Layout) -> tuple[Layout, ...]:
        """Moves both names to this namespace and retires whichever held them."""
        spec, retired = layout.spec, []
        for name in (spec.model, alias(spec)):
            holder = self._names.get((spec.tenant, name))
            self._names[spec.tenant, name] = layout.digest
            if holder is None or holder == layout.digest:
                continue
            entry = self._registered[holder]
            if not entry.is_retired:
                self._registered[holder] = replace(entry, is_retired=True)
                retired.append(entry.layout)
        return tuple(retired)

    def _unname(self, tenant: str, name: str, namespace_digest: bytes) -> None:
        if self._names.get((tenant, name)) == namespace_digest:
            del self._names[tenant, name]

    def _entry(self, namespace_digest: bytes) -> _Registered:
        entry = self._registered.get(namespace_digest)
        if entry is None:
            raise NotFound(f"namespace is not open namespace={namespace_digest[:32].hex()}")
        return entry


GROUPS_TAG = 13


def _fields(spec: NamespaceSpec) -> _Fields:
    """Identity apart from the groups. A tag is never reused; a new field is left out at its
    default, so that old digests stay.
    """
    return (
        (1, "tenant", spec.tenant),
        (2, "model", spec.model),
        (3, "revision", spec.revision),
        (4, "dtype", spec.dtype),
        (5, "layout", spec.layout),
        (6, "layout_version", spec.layout_version),
        (7, "block_tokens", spec.block_tokens),
        (8, "tp", spec.tp),
        (9, "pp", spec.pp),
        (10, "checkpoint_policy", spec.checkpoint_policy.value),
        (11, "checkpoint_period_tokens", spec.checkpoint_period_tokens),
        (12, "mutable", spec.mutable),
    )


def _group_fields(group: GroupSpec) -> _Fields:
    return (
        (1, "name", group.name),
        (2, "kind", group.kind.value),
        (3, "bytes_per_block", group.bytes_per_block),
        (4, "ratio", group.ratio),
        (5, "window_tokens", group.window_tokens),
        (6, "per_block", group.per_block),
        (7, "access", group.access.value),
        (8, "sharded", group.sharded),
        (9, "lossy_ok", group.lossy_ok),
        (10, "resident", group.resident),
        (11, "retention_s", group.retention_s),
    )


def _encoded(fields: _Fields) -> bytes:
    return b"".join(_field(tag, _packed(value)) for tag, _, value in fields)


def _field(tag: int, value: bytes) -> bytes:
    return tag.to_bytes(2, "little") + len(value).to_bytes(4, "little") + value


def _packed(value: _Value) -> bytes:
    if isinstance(value, bool):
        return b"\x01" if value else b"\x00"
    if isinstance(value, int):
        return value.to_bytes(8, "little")
    return value.encode()


def _facts(spec: NamespaceSpec) -> dict[str, _Value]:
    """Every identity field by its path, and the order of the groups, which numbers their copies."""
    whole = validated(spec)
    facts: dict[str, _Value] = {name: value for _, name, value in _fields(whole)}
    facts["groups"] = " ".join(group.name for group in whole.groups)
    for group in whole.groups:
        facts |= {f"groups.{group.name}.{name}": value for _, name, value in _group_fields(group)}
    return facts


def _shown(value: _Value | None) -> str:
    return "absent" if value is None else str(value)


def _layout(namespace_id: NamespaceId, spec: NamespaceSpec) -> Layout:
    whole = validated(spec)
    namespace_digest = digest(whole)
    return Layout(namespace_id, namespace_digest, seed(namespace_digest), whole)


def _spec(row: Mapping[str, Any]) -> NamespaceSpec:  # Any: JSON; the digest proves identity fields
    fields = dict(row)
    groups = tuple(
        GroupSpec(**dict(g) | {"kind": GroupKind(g["kind"]), "access": Access(g["access"])})
        for g in fields.pop("groups")
    )
    policy = CheckpointPolicy(fields.pop("checkpoint_policy"))
    return NamespaceSpec(groups=groups, checkpoint_policy=policy, **fields)
