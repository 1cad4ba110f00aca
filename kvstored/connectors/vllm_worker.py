"""A worker's half of the vLLM connector: pages to the daemon and back.

Loads run in threads of their own, into pages that vLLM keeps for them until they are reported. Stores copy their pages at once, while the step
that they belong to still owns them, and go to the daemon in the background.
"""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstored.client import Gather, Keys
from kvstored.client.scatter import BufferRow
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.vllm_plans import EngineLayout, Load, Plans, Store, wanted_runs

if TYPE_CHECKING:
    from kvstored.connectors.vllm_pages import GroupPages  # which imports torch

log = logging.getLogger("kvstored.connectors")

_LAYER_STEPS = 4
"""A load that a step waits for comes in so many runs of layers; each is verified against the whole piece, so more would only hash more."""
_STORED_MAX = 65_536


@dataclass(slots=True)
class Done:
    """Loads since the last time. `failed_pages`: those that did not come, of models with one group; `failed`: requests of which any did not."""

    loaded: set[str] = field(default_factory=set)
    sent: set[str] = field(default_factory=set)
    """Requests that have ended, whose pages are not needed any more."""
    failed: set[str] = field(default_factory=set)
    failed_pages: set[int] = field(default_factory=set)
    stored: list[bytes] = field(default_factory=list)
    """Keys of blocks that the daemon has now."""


class WorkerSide:
    """`shard`: this rank's. `tells_stored`: whether anybody wants to know which blocks were stored."""

    def __init__(
        self, layout: EngineLayout, guarded: GuardedNamespace, *, shard: int, tells_stored: bool
    ) -> None:
        self.layout = layout
        self.guarded = guarded
        self._shard = shard
        self._pages: tuple[GroupPages, ...] = ()
        self._threads = ThreadPoolExecutor(2, "kvstored-load")
        self._lock = threading.Lock()
        self._done = Done()
        self._layer_waits: dict[str, list[Future[None]]] = {}
        self._tells_stored = tells_stored
        self._is_spoilt = False
        """A load of this step failed while the step used it."""

    def register(self, pages: tuple["GroupPages", ...]) -> None:
        self._pages = pages

    # ---- loads

    def start_loads(self, plans: Plans) -> None:
        for load in plans.loads:
            if not self._pages:
                self._ended(load, range(len(load.pages)))
            elif load.in_step:
                self._start_in_step(load)
            else:
                self._threads.submit(self._guarded_load, load, slice(None))

    def wait_for_layer(self, layer: str) -> None:
        """Returns when all that this step loads of the layer has come, or failed."""
        for waited in self._layer_waits.pop(layer, ()):
            waited.result()

    def end_step(self) -> None:
        """Nothing that was loaded for this step outlives it, whatever layers were asked for."""
        for layer in list(self._layer_waits):
            self.wait_for_layer(layer)

    def take_done(self) -> Done:
        with self._lock:
            done, self._done = self._done, Done()
        self._is_spoilt = False
        return done

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _start_in_step(self, load: Load) -> None:
        """Layer by layer, of a model with one group: the first layers can be used while the last ones come."""
        (group,) = self.layout.groups
        count = len(group.layer_names)
        step = -(-count // _LAYER_STEPS)
        for start in range(0, count, step):
            layers = slice(start, min(start + step, count))
            waited = self._threads.submit(self._guarded_load, load, layers)
            for name in group.layer_names[layers]:
                self._layer_waits.setdefault(name, []).append(waited)

    def _guarded_load(self, load: Load, layers: slice) -> None:
        """The border of a thread: whatever happens, the request goes on."""
        failed: Sequence[int] = range(len(load.pages))
        try:
            failed = self._load(load, layers)
        except Exception:
            log.exception("a load failed, its blocks are computed: request=%s", load.request)
        self._ended(load, failed)

    def _load(self, load: Load, layers: slice) -> list[int]:
        """Into the pages; the blocks that did not come whole, by their place in the plan."""
        failed: list[int] = []
        keys = load.run.keys()
        for first, last, wanted in wanted_runs(load.pages):
            pieces = [
                [self._pages[g].target(row[g], layers) for g in wanted]
                for row in load.pages[first:last]
            ]
            loaded = self.guarded.load(
                keys[first:last],
                [_row([piece.gather for piece in row]) for row in pieces],
                groups=[self.layout.groups[g].name for g in wanted],
                shard=self._shard,
                ranges=self._ranges(layers),
            )
            for i, (row, is_whole) in enumerate(zip(pieces, loaded.whole, strict=True), first):
                if not is_whole:
                    failed.append(i)
                    continue
                for piece in row:
                    piece.finish()
        return failed

    def _ranges(self, layers: slice) -> list[tuple[int, int]] | None:
        if layers == slice(None):
            return None
        (group,) = self.layout.groups
        each = self.layout.block_tokens // group.page_tokens
        start = sum(group.layer_bytes[: layers.start]) * each
        return [(start, sum(group.layer_bytes[layers]) * each)]

    def _ended(self, load: Load, failed: Sequence[int]) -> None:
        with self._lock:
            if failed:
                self._done.failed.add(load.request)
                self._is_spoilt |= load.in_step
            for i in failed:
                for pages in load.pages[i]:
                    self._done.failed_pages.update(page for page in pages if page is not None)
            if not load.in_step:
                self._done.loaded.add(load.request)

    # ---- stores

    def copy_stores(self, plans: Plans) -> None:
        """Takes a copy of what is to be stored; the pages are free when it returns."""
        for store in plans.stores:
            # What was computed over a load that failed in this very step must not be kept, whose request it may be.
            if self._pages and not self._is_spoilt:
                self._copy(store)
            if store.is_last:
                with self._lock:
                    self._done.sent.add(store.request)

    def _copy(self, store: Store) -> None:
        groups = self.layout.groups
        chosen = [i for i, g in enumerate(groups) if g.is_sharded or self._shard == 0]
        if not chosen:
            return
        pieces = [[self._pages[i].source(pages[i]) for i in chosen] for pages in store.pages]
        self.guarded.store_later(
            store.run.keys(),
            [_row(row) for row in pieces],
            groups=[groups[i].name for i in chosen],
            shard=self._shard,
            done=self._stored if self._tells_stored else None,
        )

    def _stored(self, keys: Keys, stored: tuple[bool, ...]) -> None:
        with self._lock:
            self._done.stored += [key for key, is_so in zip(keys, stored, strict=True) if is_so]
            del self._done.stored[:-_STORED_MAX]


def _row(gathers: list[Gather] | list[Gather | None]) -> BufferRow:
    """As the client takes the buffers of a block: one list a group, or the buffers themselves where there is one."""
    return gathers[0] if len(gathers) == 1 else gathers
