"""LMCache's server keeps its objects in kvstored: the L2 adapter that its `plugin` type loads.

Written for LMCache 0.5.6 (`versions`). A call only puts a task into a bounded queue and returns; a task always ends, and tells so by its
event, with a failure or misses where the daemon cannot be had. No buffer of LMCache's is touched after its task has ended.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier
from numpy.typing import NDArray

from kvstored.client import Namespace
from kvstored.connectors import versions
from kvstored.connectors.breaker import State
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.lmcache_books import Ledger, Lock, Locks, Stored
from kvstored.connectors.lmcache_events import Departures
from kvstored.connectors.lmcache_objects import Sort, Spaces, key_of, sort_of, unchained
from kvstored.connectors.lmcache_tasks import Tasks
from kvstored.connectors.options import ConnectorOptions
from kvstored.core.namespace import digest
from kvstored.units import parse_size

log = logging.getLogger("kvstored.connectors")

LOCK_TTL_S = 60
"""A lock that LMCache never ends; its loads take seconds."""
_READABLE = 0x80
_KEYS = 1024


class KvstoredL2Config(L2AdapterConfigBase):  # type: ignore[misc]  # LMCache ships no types
    """`adapter_params`: the connector's options, and `capacity`: where LMCache shall evict by itself, from what size on."""

    def __init__(self, options: ConnectorOptions, capacity_bytes: int = 0) -> None:
        self.options = options
        self.capacity_bytes = capacity_bytes

    @classmethod
    def from_dict(cls, d: dict[str, object]) -> "KvstoredL2Config":
        ours = dict(d)
        capacity = ours.pop("capacity", "0B")
        return cls(ConnectorOptions.parsed(ours), parse_size(str(capacity)))

    @classmethod
    def help(cls) -> str:
        return (
            "kvstored: address (unix:///path or host:port), revision (commit or version of the weights), model, tenant,"
            " lookup, load, store, probe (durations: '200ms'), verify, supersede, capacity ('64GiB', default: kvstored evicts)"
        )


class KvstoredL2(L2AdapterInterface):  # type: ignore[misc]  # LMCache ships no types
    """Thread-safe, as LMCache's store and prefetch controllers need it."""

    def __init__(
        self, config: KvstoredL2Config, l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        super().__init__(max_capacity_bytes=config.capacity_bytes)
        self._options = config.options
        release = versions.check(versions.LMCACHE)
        if versions.is_newer(release, versions.LMCACHE):
            log.warning("LMCache %s is newer than this connector is tested with", release)
        self._spaces = Spaces(config.options, release)
        self._ledger: Ledger[ObjectKey] = Ledger()
        self._locks = Locks()
        # Of each kind its own threads: a lookup never waits behind a slow store.
        self._stores: Tasks[L2StoreResult] = Tasks("store", create_event_notifier(), workers=2)
        self._lookups: Tasks[Bitmap] = Tasks("lookup", create_event_notifier(), workers=2)
        self._loads: Tasks[Bitmap] = Tasks("load", create_event_notifier(), workers=4)
        self._departures = Departures(config.options, self._departed, self._held)

    # ---- events

    def get_store_event_fd(self) -> int:
        return self._stores.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event_fd

    def get_load_event_fd(self) -> int:
        return self._loads.event_fd

    # ---- stores

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        failed = L2StoreResult(success=False, bytes_transferred=0)
        return self._stores.submit(lambda: self._store(keys, objects), otherwise=failed)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stores.pop_all()

    # ---- lookups and locks

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        nothing = Bitmap(len(keys))
        return self._lookups.submit(
            lambda: self._look_and_lock(keys, group_layout_descs), otherwise=nothing
        )

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Never fails: an unpin that does not reach the daemon is made up for by the pin's end."""
        self._unpin(self._locks.unlock([key_of(key) for key in keys]))

    # ---- loads

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._loads.submit(lambda: self._load(keys, objects), otherwise=Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.pop(task_id)

    # ---- keeping house

    def delete(self, keys: list[ObjectKey]) -> None:
        """What the daemon did not confirm stays in the accounts."""
        by_space: dict[GuardedNamespace, list[bytes]] = {}
        for key in keys:
            for space in self._spaces.like(key):
                by_space.setdefault(space, []).append(key_of(key))
        for space, block_keys in by_space.items():
            for start in range(0, len(block_keys), _KEYS):
                part = block_keys[start : start + _KEYS]
                if space.attempt(self._removed(part), otherwise=False):
                    self._departed(part)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """Of what this server stored and did not lose since; the daemon may hold more."""
        if page_size <= 0 or (cursor is not None and not cursor.isdecimal()):
            raise ValueError(f"page_size is positive, cursor from the page before: {cursor!r}")
        first = int(cursor or 0)
        listed = [
            KeyEntry(key=stored.key.to_encoded_object_key(), size_bytes=stored.size_bytes)
            for _, stored in self._ledger.items()
            if model_name in (None, stored.key.model_name)
        ]
        end = first + page_size
        token = str(end) if end < len(listed) else None
        return KeyListPage(entries=tuple(listed[first:end]), next_page_token=token)

    def report_status(self) -> dict[str, object]:
        spaces = self._spaces.all()
        totals: dict[str, float] = {}
        for space in spaces.values():
            for name, amount in space.statistics.totals().items():
                totals[name] = totals.get(name, 0) + amount
        return {
            "is_healthy": all(space.state is State.UP for space in spaces.values()),
            "type": "KvstoredL2",
            "namespaces": len(spaces),
            "stored_object_count": len(self._ledger),
            "locked_key_count": len(self._locks),
            **totals,
        }

    def close(self) -> None:
        """Waits for what runs: LMCache's buffers are its own afterwards."""
        self._departures.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.close()
        self._spaces.close()

    # ---- inside: in the threads of the tasks

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        buffers = [_bytes_of(each) for each in objects]
        is_whole, new_bytes = True, 0
        for sort, indices in _by_sort(keys, [each.size for each in buffers]).items():
            space = self._spaces.of(sort)
            if space is None:
                is_whole = False
                continue
            block_keys = [key_of(keys[i]) for i in indices]
            stored = space.store(unchained(block_keys), [buffers[i] for i in indices])
            is_whole &= all(stored)
            name = digest(space.spec)
            entries = [
                (block_key, Stored(keys[i], sort.size_bytes, name))
                for i, block_key, is_there in zip(indices, block_keys, stored, strict=True)
                if is_there
            ]
            new_bytes += self._tell_stored(entries)
        return L2StoreResult(success=is_whole, bytes_transferred=new_bytes)

    def _tell_stored(self, entries: list[tuple[bytes, Stored[ObjectKey]]]) -> int:
        new, forgotten = self._ledger.add(entries)
        if new:
            self._notify_keys_stored([each.key for each in new], [each.size_bytes for each in new])
        self._tell_deleted(forgotten)
        return sum(each.size_bytes for each in new)

    def _look_and_lock(self, keys: list[ObjectKey], descs: dict[int, MemoryLayoutDesc]) -> Bitmap:
        found = Bitmap(len(keys))
        block_keys = [key_of(key) for key in keys]
        sizes = [
            self._ledger.size_of(block_key) or _bytes_per_object(descs.get(key.object_group_id))
            for key, block_key in zip(keys, block_keys, strict=True)
        ]
        for sort, indices in _by_sort(keys, sizes).items():
            space = self._spaces.of(sort) if sort.size_bytes else None
            if space is None:
                continue
            hits: list[int] = []
            for start in range(0, len(indices), _KEYS):
                part = indices[start : start + _KEYS]
                told = space.attempt(
                    self._located([block_keys[i] for i in part]), [False] * len(part)
                )
                hits += [i for i, is_there in zip(part, told, strict=True) if is_there]
            self._lock([block_keys[i] for i in hits], sort)
            for i in hits:
                found.set(i)
        return found

    def _located(self, block_keys: list[bytes]) -> Callable[[Namespace], list[bool]]:
        def locate(namespace: Namespace) -> list[bool]:
            told = namespace.locate(unchained(block_keys), timeout_s=self._options.lookup_s)
            return [bool(tiers & _READABLE) for tiers in told.tiers]

        return locate

    def _lock(self, block_keys: list[bytes], sort: Sort) -> None:
        """Best effort: what is not pinned may be gone when it is loaded, which is a miss then."""
        space = self._spaces.of(sort)
        if not block_keys or space is None:
            return
        for start in range(0, len(block_keys), _KEYS):
            part = block_keys[start : start + _KEYS]
            pin = space.attempt(self._pinned(part), None)
            if pin is not None:
                self._unpin(self._locks.add(part, Lock(digest(space.spec), pin, len(part))))

    def _pinned(self, block_keys: list[bytes]) -> Callable[[Namespace], int | None]:
        def pin(namespace: Namespace) -> int | None:
            keys = unchained(block_keys)
            return namespace.pin(keys, ttl_s=LOCK_TTL_S, timeout_s=self._options.lookup_s).pin

        return pin

    def _removed(self, block_keys: list[bytes]) -> Callable[[Namespace], bool]:
        def remove(namespace: Namespace) -> bool:
            namespace.remove(unchained(block_keys), timeout_s=self._options.store_s)
            return True

        return remove

    def _unpin(self, ended: Sequence[Lock]) -> None:
        spaces = {digest(space.spec): space for space in self._spaces.all().values()}
        for lock in ended:
            space = spaces.get(lock.space)
            if space is not None:
                self._lookups.run_unnoticed(partial(space.attempt, self._unpinned(lock.pin), None))

    def _unpinned(self, pin: int) -> Callable[[Namespace], bool | None]:
        return lambda namespace: namespace.unpin(pin, timeout_s=self._options.lookup_s)

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        found = Bitmap(len(keys))
        buffers = [_bytes_of(each) for each in objects]
        accessed: list[ObjectKey] = []
        for sort, indices in _by_sort(keys, [each.size for each in buffers]).items():
            space = self._spaces.of(sort)
            if space is None:
                continue
            block_keys = [key_of(keys[i]) for i in indices]
            came = space.load(unchained(block_keys), [buffers[i] for i in indices]).whole
            for i, is_there in zip(indices, came, strict=True):
                if is_there:
                    found.set(i)
                    accessed.append(keys[i])
        if accessed:
            self._notify_keys_accessed(accessed)
        return found

    # ---- inside: what the daemon let go

    def _departed(self, block_keys: Sequence[bytes]) -> None:
        self._tell_deleted(self._ledger.remove(block_keys))

    def _tell_deleted(self, gone: Sequence[Stored[ObjectKey]]) -> None:
        if gone:
            self._notify_keys_deleted(
                [each.key for each in gone], [each.size_bytes for each in gone]
            )

    def _held(self) -> dict[bytes, list[bytes]]:
        """Block keys in the accounts, by namespace."""
        by_space: dict[bytes, list[bytes]] = {}
        for block_key, stored in self._ledger.items():
            by_space.setdefault(stored.space, []).append(block_key)
        return by_space


def _bytes_of(memory: MemoryObj) -> NDArray[np.uint8]:
    """An object's bytes where they lie."""
    return np.frombuffer(memory.byte_array, dtype=np.uint8)


def _bytes_per_object(desc: MemoryLayoutDesc | None) -> int:
    if desc is None:
        return 0
    return sum(
        int(shape.numel()) * int(dtype.itemsize)
        for shape, dtype in zip(desc.shapes, desc.dtypes, strict=True)
    )


def _by_sort(keys: Sequence[ObjectKey], sizes: Sequence[int]) -> dict[Sort, list[int]]:
    """Indices of the keys of each namespace."""
    sorts: dict[Sort, list[int]] = {}
    for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
        sorts.setdefault(sort_of(key, size), []).append(i)
    return sorts
