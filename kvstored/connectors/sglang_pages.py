"""One host pool of SGLang as one namespace: a page is a block, its bytes in the order in which the pool tells its parts.

Not here: what SGLang calls, and when.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstored.client import Gather, GroupKind, GroupSpec, Keys, Namespace, NamespaceSpec
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.identity import namespace_of
from kvstored.connectors.memory import Bytes, bytes_at
from kvstored.connectors.options import ConnectorOptions

LAYOUT_VERSION = 1
_READABLE = 0x80
"""In what Locate tells: the block can be read whole."""
_LOCATE_KEYS = 1024

HostPool = Any  # a class of SGLang, which ships no types
Indices = Any  # a tensor of torch


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process stands among those that share a model; `tp` and `tp_size` are 0 and 1 where every tensor-parallel rank has the
    same bytes.
    """

    tp: int
    tp_size: int
    pp: int
    pp_size: int
    cp: int
    cp_size: int
    dcp: int
    dcp_size: int

    @property
    def suffix(self) -> bytes:
        """The rank is part of the key: SGLang itself asks every rank and takes the shortest prefix, on one host or on many."""
        return struct.pack("<HHHH", self.tp, self.pp, self.cp, self.dcp)

    @property
    def shape(self) -> str:
        """In the name too: engines of other shapes serve the same model beside this one, none is an error."""
        return f"tp{self.tp_size}pp{self.pp_size}cp{self.cp_size}dcp{self.dcp_size}"


@dataclass(frozen=True, slots=True)
class Model:
    """Whose KV it is, the same for every pool of an engine."""

    name: str
    revision: str


def key_of(page_hash: str, suffix: bytes) -> bytes:
    """SGLang's chained SHA-256 of a page, in hex, and the rank; any other text by its hash."""
    try:
        digest = bytes.fromhex(page_hash) if len(page_hash) == 64 else b""
    except ValueError:
        digest = b""
    return (digest or hashlib.sha256(page_hash.encode()).digest()) + suffix


def usable_prefixes(there: Sequence[bool], trailing: int) -> list[int]:
    """Lengths at which a prefix can be resumed: with all pages before it, or, where `trailing`, with that many of the last ones."""
    if not trailing:
        whole = next((i for i, is_there in enumerate(there) if not is_there), len(there))
        return list(range(1, whole + 1))
    return [n for n in range(1, len(there) + 1) if all(there[max(n - trailing, 0) : n])]


class PoolSpace:
    """`in_place`: pages are read and written where they lie, else by a flat copy that the pool makes. `is_shared`: every tensor-parallel
    rank has the same bytes. Data calls raise only what the pool raises: the caller is the border.
    """

    def __init__(
        self,
        pool: HostPool,
        name: str,
        *,
        in_place: bool,
        model: Model,
        place: Place,
        is_shared: bool,
        options: ConnectorOptions,
    ) -> None:
        self.pool = pool
        self.is_shared = is_shared
        self.in_place = in_place and _tells_parts(pool)
        self._options = options
        self._suffix = place.suffix
        self.page_bytes = sum(_part_sizes(pool) if self.in_place else [_flat_bytes(pool)])
        self.guarded = GuardedNamespace(
            self._spec(name, model, place), options, name=f"sglang-{name}"
        )

    def keys(
        self, hashes: Sequence[str], prefix: Sequence[str] | None = None, *, unchained: bool = False
    ) -> Keys:
        made = [key_of(page_hash, self._suffix) for page_hash in hashes]
        parent = key_of(prefix[-1], self._suffix) if prefix and not unchained else b""
        return Keys.opaque(made, parent=parent, unchained=unchained)

    def there(self, keys: Keys) -> list[bool]:
        """Page by page, whether it could be read now."""
        found: list[bool] = []
        for start in range(0, len(keys), _LOCATE_KEYS):
            part = keys[start : start + _LOCATE_KEYS]
            found += self.guarded.attempt(self._located(part), [False] * len(part))
        return found

    def load(self, keys: Keys, indices: Indices) -> list[bool]:
        """Into the pool; a page that did not come holds anything."""
        if self.in_place:
            return list(self.guarded.load(keys, self._gathers(len(keys), indices)).whole)
        firsts = self._first_indices(len(keys), indices)
        flats = [self.pool.get_dummy_flat_data_page() for _ in firsts]
        came = self.guarded.load(keys, [tensor_bytes(flat) for flat in flats]).whole
        for index, flat, is_there in zip(firsts, flats, came, strict=True):
            if is_there:
                self.pool.set_from_flat_data_page(index, flat)
        return list(came)

    def store(self, keys: Keys, indices: Indices) -> list[bool]:
        """Out of the pool, before it returns: SGLang gives the pages to others afterwards."""
        if self.in_place:
            return list(self.guarded.store(keys, self._gathers(len(keys), indices)))
        firsts = self._first_indices(len(keys), indices)
        flats = [self.pool.get_data_page(index, flat=True).contiguous() for index in firsts]
        return list(self.guarded.store(keys, [tensor_bytes(flat) for flat in flats]))

    # ---- inside

    def _located(self, part: Keys) -> Callable[[Namespace], list[bool]]:
        def locate(namespace: Namespace) -> list[bool]:
            told = namespace.locate(part, timeout_s=self._options.lookup_s)
            return [bool(tiers & _READABLE) for tiers in told.tiers]

        return locate

    def _gathers(self, pages: int, indices: Indices) -> list[Gather]:
        addresses, sizes = self.pool.get_page_buffer_meta(indices)
        parts, left = divmod(len(addresses), pages)
        assert not left, f"parts of pages parts={len(addresses)} pages={pages}"
        runs = [bytes_at(a, size) for a, size in zip(addresses, sizes, strict=True)]
        return [Gather.of(runs[i * parts : (i + 1) * parts]) for i in range(pages)]

    def _first_indices(self, pages: int, indices: Indices) -> list[int]:
        step, left = divmod(len(indices), pages)
        assert not left, f"indices of pages indices={len(indices)} pages={pages}"
        return [int(indices[i * step]) for i in range(pages)]

    def _spec(self, name: str, model: Model, place: Place) -> NamespaceSpec:
        pool = self.pool
        form = ",".join(map(str, _part_sizes(pool))) if self.in_place else f"flat {self.page_bytes}"
        digest = hashlib.sha256(form.encode()).hexdigest()[:12]
        return namespace_of(
            model=f"{model.name}#sglang-{name}-{place.shape}",
            revision=model.revision,
            dtype=_dtype_of(pool),
            layout=f"sglang {type(pool).__name__} {pool.layout} pages {digest} {place.shape}",
            layout_version=LAYOUT_VERSION,
            block_tokens=max(int(pool.page_size), 1),
            groups=[GroupSpec(name, GroupKind.LINEAR, self.page_bytes)],
            tp=place.tp_size,
            pp=place.pp_size,
            tenant=self._options.tenant,
        )


def tensor_bytes(tensor: Any) -> Bytes:
    """A contiguous CPU tensor of torch, without a copy and without importing torch."""
    if not tensor.is_contiguous():
        raise ValueError("a page is contiguous memory")
    return bytes_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _tells_parts(pool: HostPool) -> bool:
    """Some layouts of some pools have no parts in place."""
    try:
        return bool(_part_sizes(pool))
    except (ValueError, NotImplementedError, AssertionError):
        return False


def _part_sizes(pool: HostPool) -> list[int]:
    import torch  # noqa: PLC0415 - only SGLang's process has it

    told = pool.get_page_buffer_meta(torch.arange(max(int(pool.page_size), 1)))
    return [int(size) for size in told[1]] if told else []


def _dtype_of(pool: HostPool) -> str:
    try:
        return str(pool.dtype).removeprefix("torch.")
    except AttributeError:  # pools of states hold tensors of several types
        return "state"


def _flat_bytes(pool: HostPool) -> int:
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())
