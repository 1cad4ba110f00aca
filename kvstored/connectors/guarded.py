"""A namespace of the daemon as an engine may use it: nothing raises, and nothing waits beyond its limit.

A daemon that is absent, killed, hung or restarting makes every call a miss; threads of its own (one that reaches for the daemon, one that
stores, a few that wait for lookups) do the rest. One object a process: make it after a fork.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvstored.client import (
    FillStatus,
    GetResult,
    Keys,
    Match,
    Namespace,
    NamespaceSpec,
    PutResult,
)
from kvstored.client.copying import Bytes
from kvstored.client.keys import ExtraKeys, token_keys
from kvstored.client.rows import selection_of
from kvstored.client.scatter import BufferRow, Gather, Ranges, gathers_of
from kvstored.clock import Clock, SystemClock
from kvstored.connectors.breaker import State
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.queue import Batch, Done, StoreQueue
from kvstored.connectors.reach import Reach
from kvstored.connectors.statistics import HIT_TIER_TOKENS, Stat, Statistics
from kvstored.core.frames import is_coded
from kvstored.core.keys import Tokens, content_keys, root
from kvstored.core.namespace import digest
from kvstored.core.types import BATCH_KEYS_MAX

T = TypeVar("T")

_LOOKUP_KEYS = 1024
"""Of one message: what has been answered when the time is over is a shorter prefix. Where a hit depends on windows before it, as many as go."""
_LOOKUPS_AT_ONCE = 4
_ANSWER_S = 0.5
"""A slow tier is told by the daemon when the load's time is over; only a daemon that says nothing for longer is taken for hung."""
_LOAD_BYTES = 64 << 20
"""Of one message, as above."""
NO_MATCH = Match(0, 0, 0, 0, (0, 0, 0, 0), "away")


@dataclass(frozen=True, slots=True)
class Loaded:
    """`filled`: per key, per selected group, whether the piece is in the caller's buffers; buffers of others hold anything."""

    filled: tuple[tuple[bool, ...], ...]

    @property
    def whole(self) -> tuple[bool, ...]:
        """Per key, whether all of it came."""
        return tuple(all(row) for row in self.filled)

    @property
    def prefix(self) -> int:
        """Whole blocks before the first that is not."""
        return next((i for i, is_whole in enumerate(self.whole) if not is_whole), len(self.filled))


class GuardedNamespace:
    """Thread-safe. The daemon is reached for from the start, in the background; `connected` waits for it.

    `name`: of the connector, in log lines and in the daemon's list of clients.
    """

    def __init__(
        self,
        spec: NamespaceSpec,
        options: ConnectorOptions,
        *,
        name: str,
        clock: Clock | None = None,
    ) -> None:
        self.spec = spec
        self.statistics = Statistics()
        self._digest = digest(spec)
        self._options = options
        self._clock = clock or SystemClock()
        self._reach = Reach(spec, options, self.statistics, name=name, clock=self._clock)
        self._lookups = ThreadPoolExecutor(_LOOKUPS_AT_ONCE, "kvstored-lookup")
        self._lookup_slots = threading.BoundedSemaphore(_LOOKUPS_AT_ONCE)
        self._queue = StoreQueue(self._store_batch, bytes_max=options.queue_bytes)

    # ---- the daemon

    @property
    def state(self) -> State:
        return self._reach.state

    def connected(self, timeout_s: float) -> bool:
        """Waits until the daemon is there, or has refused; whether it is there."""
        return self._reach.connected(timeout_s)

    def attempt(self, call: Callable[[Namespace], T], otherwise: T) -> T:
        """Any other call of the namespace, guarded as those below: `otherwise` where it cannot be had."""
        return self._reach.attempt(call, otherwise)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stores what waits, as long as there is time, and ends the session."""
        self._queue.close(timeout_s)
        self._lookups.shutdown(wait=False)
        self._reach.close()

    # ---- keys

    def keys(self, tokens: Tokens, extra_keys: ExtraKeys = ()) -> Keys:
        """As `Namespace.keys`, without the daemon."""
        return token_keys(self._digest, self.spec, tokens, extra_keys)

    def content_keys(
        self, tokens: Tokens, first_token: int, extra_keys: Sequence[bytes]
    ) -> tuple[bytes, ...]:
        """What blocks of these tokens contain, for an engine with hashes of its own (`Keys.content_keys`)."""
        if not is_coded(self.spec):
            return ()
        root_key = root(self._digest, extra_keys)
        return tuple(content_keys(root_key, tokens, self.spec.block_tokens, first_token))

    # ---- lookups

    def lookup(self, keys: Keys, *, timeout_s: float | None = None) -> Match:
        """The longest readable prefix, as far as it was told in time."""
        wait_s = self._options.lookup_s if timeout_s is None else timeout_s
        self.statistics.count(Stat.LOOKUPS)
        self.statistics.count(Stat.LOOKUP_TOKENS, len(keys) * self.spec.block_tokens)
        if self.state is not State.UP or not self._lookup_slots.acquire(blocking=False):
            self.statistics.count(Stat.SKIPPED_CALLS)
            return NO_MATCH
        began_s = self._clock.elapsed_s()
        told = [NO_MATCH]
        try:
            asked = self._lookups.submit(self._look, keys, told, wait_s)
        except RuntimeError:  # closed meanwhile
            self._lookup_slots.release()
            return NO_MATCH
        asked.add_done_callback(lambda _: self._lookup_slots.release())
        is_late = False
        try:
            asked.result(wait_s)
        except FutureTimeoutError:
            is_late = True
        took_s = self._clock.elapsed_s() - began_s
        # or all that time went by waiting for a connection
        if is_late or (told[0] is NO_MATCH and took_s >= wait_s):
            self._reach.timed_out(wait_s)
        self.statistics.count(Stat.LOOKUP_SECONDS, took_s)
        return told[0]

    def _look(self, keys: Keys, told: list[Match], wait_s: float) -> None:
        """In a thread that may outlive the lookup: tells after each message."""
        is_plain = all(group.is_required for group in self.spec.groups)
        step = _LOOKUP_KEYS if is_plain else BATCH_KEYS_MAX
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            found = self._matched(part, wait_s)
            if found is None:
                return
            told[0] = _longer(told[0], found)
            if found.hit_blocks < len(part):
                return

    def _matched(self, keys: Keys, wait_s: float) -> Match | None:
        return self.attempt(lambda namespace: namespace.match(keys, timeout_s=wait_s), None)

    # ---- loads

    def load(
        self,
        keys: Keys,
        buffers: Sequence[BufferRow],
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ranges: Ranges | None = None,
        timeout_s: float | None = None,
    ) -> Loaded:
        """As `Namespace.get_into`; when the time is over, what came is told and nothing is written to the buffers any more."""
        began_s = self._clock.elapsed_s()
        ends_s = began_s + (self._options.load_s if timeout_s is None else timeout_s)
        self.statistics.count(Stat.LOADS)
        pieces = self._piece_bytes(groups)
        block_bytes = sum(pieces) if ranges is None else sum(length for _, length in ranges)
        filled: list[tuple[bool, ...]] = []
        for start, stop in _runs(pieces, len(keys), _LOAD_BYTES):
            left_s = ends_s - self._clock.elapsed_s()
            if left_s <= 0:
                break
            call = partial(
                Namespace.get_into,
                keys=keys[start:stop],
                buffers=buffers[start:stop],
                groups=groups,
                shard=shard,
                ranges=ranges,
                verify=self._options.verify,
                load_deadline_s=left_s,
                timeout_s=left_s + _ANSWER_S,
            )
            found: GetResult | None = self.attempt(call, None)
            if found is None:
                break
            filled += found.filled
            self._count_loaded(keys[start:stop], found, block_bytes, block_bytes / sum(pieces))
            if found.prefix_hits < stop - start and not keys.unchained:
                break
        missing = len(keys) - len(filled)
        loaded = Loaded((*filled, *((False,) * len(pieces),) * missing))
        self.statistics.count(Stat.LOAD_MISSED_BLOCKS, loaded.whole.count(False))
        self.statistics.count(Stat.LOAD_SECONDS, self._clock.elapsed_s() - began_s)
        return loaded

    # ---- stores

    def store(
        self,
        keys: Keys,
        buffers: Sequence[BufferRow],
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ends_path: bool = True,
        timeout_s: float | None = None,
    ) -> tuple[bool, ...]:
        """Per key whether it is stored now. Reads the buffers until it returns; a batch is not torn by the time limit of its messages."""
        began_s = self._clock.elapsed_s()
        self.statistics.count(Stat.STORES)
        call = partial(
            Namespace.put_from,
            keys=keys,
            buffers=buffers,
            groups=groups,
            shard=shard,
            ends_path=ends_path,
            timeout_s=self._options.store_s if timeout_s is None else timeout_s,
        )
        result: PutResult | None = self.attempt(call, None)
        self.statistics.count(Stat.STORE_SECONDS, self._clock.elapsed_s() - began_s)
        if result is None:
            self.statistics.count(Stat.SHED_AWAY_BLOCKS, len(keys))
            return (False,) * len(keys)
        status = result.status
        stored = tuple(s in (FillStatus.COMMITTED, FillStatus.PRESENT) for s in status)
        self.statistics.count(Stat.STORED_BLOCKS, stored.count(True))
        self.statistics.count(Stat.SHED_SPACE_BLOCKS, stored.count(False))
        committed = status.count(FillStatus.COMMITTED)
        self.statistics.count(Stat.STORED_BYTES, committed * sum(self._piece_bytes(groups)))
        return stored

    def store_later(
        self,
        keys: Keys,
        buffers: Sequence[BufferRow],
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ends_path: bool = True,
        done: Done | None = None,
    ) -> int:
        """Copies the first blocks, as many as there is room for, and stores them in the background; how many. The buffers are the
        caller's again when it returns. `done` is told, by the background, which of those taken are stored; it must be quick.
        """
        began_s = self._clock.elapsed_s()
        try:
            taken = self._staged(keys, buffers, groups, shard, done, ends_path=ends_path)
        except Exception as error:  # noqa: BLE001 - as in `attempt`
            self._reach.failed(error)
            return 0
        self.statistics.count(Stat.STAGED_SECONDS, self._clock.elapsed_s() - began_s)
        return taken

    def flush(self, timeout_s: float) -> bool:
        """Whether everything that was to be stored in the background was stored, or given up, in time."""
        return self._queue.flush(timeout_s)

    def _staged(
        self,
        keys: Keys,
        buffers: Sequence[BufferRow],
        groups: Sequence[str] | None,
        shard: int,
        done: Done | None,
        *,
        ends_path: bool,
    ) -> int:
        if self.state is not State.UP:
            self.statistics.count(Stat.SHED_AWAY_BLOCKS, len(keys))
            return 0
        count = self._groups_count(groups)
        pieces = gathers_of(buffers, len(keys), count, writable=False)
        rows = [pieces[i * count : (i + 1) * count] for i in range(len(keys))]
        taken = self._queue.room_for([sum(g.size for g in row if g) for row in rows])
        self.statistics.count(Stat.SHED_QUEUE_BLOCKS, len(keys) - taken)
        if taken:
            copied = tuple(tuple(_copied(row)) for row in rows[:taken])
            named = None if groups is None else tuple(groups)
            is_end = ends_path and taken == len(keys)
            self._queue.add(Batch(keys[:taken], copied, named, shard, is_end, done))
        return taken

    def _store_batch(self, batch: Batch) -> None:
        stored = self.store(
            batch.keys,
            batch.rows if self._groups_count(batch.groups) > 1 else [row[0] for row in batch.rows],
            groups=batch.groups,
            shard=batch.shard,
            ends_path=batch.ends_path,
        )
        if batch.done is not None:
            batch.done(batch.keys, stored)

    # ---- inside

    def _count_loaded(self, keys: Keys, found: GetResult, block_bytes: int, share: float) -> None:
        """`share`: of each block, where only ranges of it were loaded: all ranges together count as the block."""
        whole = [all(row) for row in found.filled]
        tokens = [self.spec.block_tokens] * len(whole)
        tokens[-1] = keys.last_valid_tokens or tokens[-1]
        for tier, is_whole, valid in zip(found.tiers, whole, tokens, strict=True):
            if is_whole and tier < len(HIT_TIER_TOKENS):
                self.statistics.count(HIT_TIER_TOKENS[tier], valid * share)
        self.statistics.count(Stat.LOADED_BLOCKS, whole.count(True) * share)
        self.statistics.count(Stat.LOADED_BYTES, whole.count(True) * block_bytes)
        self.statistics.count(Stat.LOAD_CORRUPT_BLOCKS, found.corrupt)

    def _groups_count(self, groups: Sequence[str] | None) -> int:
        return len(selection_of(self.spec, groups).groups)

    def _piece_bytes(self, groups: Sequence[str] | None) -> list[int]:
        """Of one block, one a selected group."""
        chosen = selection_of(self.spec, groups).groups
        return [self.spec.groups[i].bytes_per_block for i in chosen]


def _longer(before: Match, found: Match) -> Match:
    """Two parts of a prefix, told one after the other. A checkpoint that the later part does not have is that of the earlier one."""
    hit_tokens = before.hit_tokens + found.hit_tokens
    later = before.hit_tokens + found.checkpoint_tokens
    checkpoint = later if found.checkpoint_tokens else before.checkpoint_tokens
    hbm, dram, nvme, remote = (
        a + b for a, b in zip(before.tier_blocks, found.tier_blocks, strict=True)
    )
    return Match(
        hit_blocks=before.hit_blocks + found.hit_blocks,
        hit_tokens=hit_tokens,
        checkpoint_tokens=checkpoint,
        replay_tokens=hit_tokens - checkpoint,
        tier_blocks=(hbm, dram, nvme, remote),
        miss_reason=found.miss_reason,
    )


def _runs(piece_bytes: Iterable[int], keys: int, bytes_max: int) -> Iterable[tuple[int, int]]:
    """Runs of keys that one message is for."""
    step = max(1, min(BATCH_KEYS_MAX, bytes_max // max(sum(piece_bytes), 1)))
    return ((start, min(start + step, keys)) for start in range(0, keys, step))


def _copied(row: Sequence[Gather | None]) -> Iterable[Bytes | None]:
    return (None if gather is None else gather.joined() for gather in row)
