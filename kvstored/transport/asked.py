"""Requests as messages -> what the store is asked, checked. Whatever is wrong with a message ends here as InvalidArgument or NotFound.

Nothing here changes anything: a call whose message is bad has done nothing.
"""

import asyncio
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstored.core import keys as block_keys
from kvstored.core.advice import LoadQuestion, PrefillRun
from kvstored.core.calls import Acquire, Parents, Reserve
from kvstored.core.groups import consumable, expected_bytes, valid_tokens_of
from kvstored.core.hints import NAME_CHARACTERS_MAX, NO_HINT, PRIORITY_MAX, FollowUp, Hint
from kvstored.core.planned import Single
from kvstored.core.types import KeyBatch, Layout, NamespaceSpec, TierId
from kvstored.core.usage import depth_of
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.store.sessions import Session
from kvstored.store.store import Store
from kvstored.transport.caller import Caller
from kvstored.wire.packing import mask_of, selected_groups, unpack_table, unpack_u64

REQUEST_ID_BYTES_MAX = 64
HANDLES_MAX = 65_536
"""Fills or leases in one call."""


@dataclass(frozen=True, slots=True)
class Put:
    """A reservation, whole and checked."""

    session: Session
    layout: Layout
    columns: tuple[int, ...]
    call: Reserve


class SinglePut(NamedTuple):
    """One plain, full block."""

    session: Session
    layout: Layout
    put: Single


@dataclass(frozen=True, slots=True)
class Get:
    session: Session
    layout: Layout
    columns: tuple[int, ...]
    call: Acquire
    wait_s: float


SCAN_WAIT_S, SCAN_LOOK_S = 1.0, 0.005
"""How long a put waits for the scan of memory after a restart, and how often it looks."""


class Asked:
    """Reads messages against the sessions and namespaces of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def scanned(self) -> None:
        """Right after a restart nothing is granted in memory until it is scanned, which takes milliseconds a GiB: a put waits for that a
        little, instead of finding no space."""
        shell, loop = self._store.shell, asyncio.get_running_loop()
        ends_s = loop.time() + SCAN_WAIT_S
        # a few looks after a restart are not worth an event that everything else would have to keep
        while TierId.DRAM in shell.catalog.recovering and loop.time() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(SCAN_LOOK_S)

    def session(self, token: bytes, caller: Caller) -> Session:
        return self._store.clients.use(token, tenant=caller.tenant)

    def layout(self, digest: bytes, caller: Caller) -> Layout:
        return self._store.registry.get(digest, tenant=caller.tenant)

    def put(self, request: pb.ReserveRequest, caller: Caller) -> Put:
        session = self.session(request.session, caller)
        layout = self.layout(request.namespace, caller)
        keys, parents = keys_and_parents(layout, request.keys)
        columns = columns_of(layout, request.groups)
        sizes = sizes_of(request.sizes, layout.spec, columns, len(keys), request.last_valid_tokens)
        if columns != layout.required:
            kept = self._consumable(request, layout, keys, parents)
            sizes = np.where(kept[:, list(columns)], sizes, np.uint64(0))
        call = Reserve(
            session=session.core,
            ns=layout.id,
            shard=request.shard,
            keys=keys,
            parents=parents,
            groups_mask=mask_of(columns),
            sizes=sizes,
            last_valid_tokens=request.last_valid_tokens,
            ttl_s=self._store.limits.fill_ttl(request.fill_ttl_ms / 1000),
            request_id=request_id_of(request.request_id),
            hint=hint_of(request.hint) if request.HasField("hint") else NO_HINT,
            contents=_contents(layout, request.content_keys, len(keys)),
        )
        return Put(session, layout, columns, call)

    def single(self, request: pb.ReserveRequest, caller: Caller) -> SinglePut | None:
        """`put` of one plain, full block, without an array; None for all else, and for what is to be refused."""
        keys = request.keys
        if len(keys.packed) != keys.key_bytes or keys.parents or keys.extra_keys:
            return None
        if request.content_keys or request.last_valid_tokens or request.shard:
            return None
        session = self.session(request.session, caller)
        layout = self.layout(request.namespace, caller)
        length = layout.spec.groups[0].bytes_per_block
        if not layout.is_plain or request.groups > 1:
            return None
        if request.sizes and request.sizes != length.to_bytes(8, "little"):
            return None
        fingerprint = block_keys.checked_fingerprint(keys.packed, layout.seed)
        parent = None
        if keys.parent:
            if len(keys.parent) != keys.key_bytes or keys.parent == keys.packed:
                return None
            parent = block_keys.checked_fingerprint(keys.parent, layout.seed)
        put = Single(
            session.core,
            layout.id,
            length,
            fingerprint,
            parent,
            request_id_of(request.request_id),
            hint_of(request.hint) if request.HasField("hint") else NO_HINT,
        )
        return SinglePut(session, layout, put)

    def _consumable(
        self, request: pb.ReserveRequest, layout: Layout, keys: KeyBatch, parents: Parents
    ) -> NDArray[np.bool_]:
        """Pieces that a future hit can consume. Keys that are no path of their own are ends each, at depths that are not known."""
        spec, ends_path = layout.spec, request.ends_path
        if not request.keys.unchained and not request.keys.parents:
            depth = self._first_depth(layout, parents) if len(keys) else 0
            last = request.last_valid_tokens
            return consumable(spec, depth, len(keys), last, ends_path=ends_path)
        alone = consumable(spec, None, 1, 0, ends_path=ends_path)
        return np.repeat(alone, len(keys), axis=0)

    def _first_depth(self, layout: Layout, parents: Parents) -> int | None:
        if not parents.known[0]:
            return 0
        low, high = parents.fingerprints[0].tolist()
        depth = depth_of(self._store.shell.catalog.books, layout.id, (low, high))
        return None if depth is None else depth + 1

    def get(self, request: pb.AcquireRequest, caller: Caller) -> Get:
        session = self.session(request.session, caller)
        layout = self.layout(request.namespace, caller)
        columns = columns_of(layout, request.groups)
        call = Acquire(
            session=session.core,
            ns=layout.id,
            shard=request.shard,
            keys=keys_of(layout, request.keys),
            groups_mask=mask_of(columns),
            ttl_s=self._store.limits.lease_ttl(request.lease_ttl_ms / 1000),
            tier=memory_of(request.tier),
            exact=request.exact,
        )
        wait_s = (
            0.0 if request.no_wait else self._store.limits.load_wait(request.deadline_ms / 1000)
        )
        return Get(session, layout, columns, call, wait_s)


def columns_of(layout: Layout, groups_mask: int) -> tuple[int, ...]:
    """The groups that a call is about, in namespace order."""
    return selected_groups(groups_mask, layout.spec) if groups_mask else layout.required


def memory_of(tier: str) -> TierId:
    """Where blocks are read or prefetched to."""
    known = {"": TierId.DRAM, "dram": TierId.DRAM, "hbm": TierId.HBM}
    if tier not in known:
        raise InvalidArgument(f"blocks are read in dram or hbm: tier={tier!r}")
    return known[tier]


def _contents(layout: Layout, packed: bytes, keys: int) -> NDArray[np.uint32] | None:
    if not packed:
        return None
    return block_keys.content_fingerprints(packed, keys, layout.seed)


def keys_of(layout: Layout, keys: pb.Keys) -> KeyBatch:
    packed, key_bytes = _mixed(layout, keys, keys.packed)
    return block_keys.key_batch(packed, key_bytes, layout.seed)


def keys_and_parents(layout: Layout, keys: pb.Keys) -> tuple[KeyBatch, Parents]:
    """The parents of consecutive keys are the keys before them; `parents` or `unchained` say otherwise."""
    batch = keys_of(layout, keys)
    count = len(batch)
    fingerprints = np.zeros((count, 2), dtype=np.uint64)
    known = np.zeros(count, dtype=np.bool_)
    if keys.parents:
        if len(keys.parents) != len(keys.packed):
            raise InvalidArgument(
                f"one parent a key: parents_bytes={len(keys.parents)} keys_bytes={len(keys.packed)}"
            )
        known[:] = np.frombuffer(keys.parents, dtype=np.uint8).reshape(count, -1).any(axis=1)
        packed, key_bytes = _mixed(layout, keys, keys.parents)
        fingerprints[:] = block_keys.key_batch(packed, key_bytes, layout.seed).fingerprints
        return batch, Parents(fingerprints, known)
    if count and not keys.unchained:
        fingerprints[1:] = batch.fingerprints[:-1]
        known[1:] = True
    if count and keys.parent:
        if len(keys.parent) != keys.key_bytes:
            raise InvalidArgument(
                f"the parent has another length than the keys: bytes={len(keys.parent)} "
                f"key_bytes={keys.key_bytes}"
            )
        packed, key_bytes = _mixed(layout, keys, keys.parent)
        fingerprints[0] = block_keys.key_batch(packed, key_bytes, layout.seed).fingerprints[0]
        known[0] = True
    return batch, Parents(fingerprints, known)


def sizes_of(
    packed: bytes, spec: NamespaceSpec, columns: tuple[int, ...], keys: int, last_valid_tokens: int
) -> NDArray[np.uint64]:
    """Bytes of every piece: 0 (not put) or what the namespace says a piece of so many tokens has; empty for all of them."""
    valid_tokens = valid_tokens_of(spec, last_valid_tokens)
    tokens = spec.block_tokens
    groups = [spec.groups[g] for g in columns]
    if len(groups) == 1 and valid_tokens == tokens:
        size = expected_bytes(groups[0], tokens, tokens)
        if packed in (b"", size.to_bytes(8, "little") * keys):
            return np.full((keys, 1), size, dtype=np.uint64)
    expected = np.empty((keys, len(columns)), dtype=np.uint64)
    if keys:
        expected[:] = [expected_bytes(group, tokens, tokens) for group in groups]
        expected[-1] = [expected_bytes(group, valid_tokens, tokens) for group in groups]
    if not packed:
        return expected
    sizes = unpack_table(packed, "sizes", keys, len(columns))
    wrong = np.argwhere((sizes != 0) & (sizes != expected))
    if len(wrong):
        i, column = wrong[0].tolist()
        raise InvalidArgument(
            f"a piece has a wrong size: key={i} group={groups[column].name!r} "
            f"bytes={sizes[i, column]} expected={expected[i, column]}"
        )
    return sizes


def sums_of(packed: bytes, columns: list[tuple[int, ...]]) -> list[dict[int, int]]:
    """Checksums by group of each fill; `columns` of a lost fill is empty and gets none."""
    if not columns:
        return []
    values = unpack_u64(packed, "checksums")
    width, rest = divmod(len(values), len(columns))
    if rest or any(mine and len(mine) != width for mine in columns):
        raise InvalidArgument(
            f"one checksum for each group of each fill: fills={len(columns)} checksums={len(values)}"
        )
    rows = values.reshape(len(columns), width).tolist()
    return [dict(zip(mine, row, strict=False)) for mine, row in zip(columns, rows, strict=True)]


def request_id_of(given: bytes) -> bytes:
    if len(given) > REQUEST_ID_BYTES_MAX:
        raise InvalidArgument(
            f"a request id is too long: bytes={len(given)} max={REQUEST_ID_BYTES_MAX}"
        )
    return given


def hint_of(given: pb.Hint) -> Hint:
    names = given.session, given.category
    if max(map(len, names)) > NAME_CHARACTERS_MAX:
        raise InvalidArgument(
            f"a name in a hint is too long: characters={max(map(len, names))} max={NAME_CHARACTERS_MAX}"
        )
    if given.priority > PRIORITY_MAX:
        raise InvalidArgument(f"no such priority: priority={given.priority} max={PRIORITY_MAX}")
    is_known = int(given.follow_up) < len(FollowUp)
    return Hint(
        FollowUp(given.follow_up) if is_known else FollowUp.UNKNOWN,
        given.output_tokens if given.HasField("output_tokens") else None,
        given.session,
        given.category,
        given.priority,
        float(given.retention_s),
    )


def conversation_of(request: pb.MatchRequest) -> str:
    if len(request.conversation) > NAME_CHARACTERS_MAX:
        count = len(request.conversation)
        raise InvalidArgument(f"a name is too long: characters={count} max={NAME_CHARACTERS_MAX}")
    return request.conversation


def question_of(request: pb.MatchRequest) -> LoadQuestion:
    speeds = request.prefill_tokens_per_s, request.prefill_flops_per_s
    _check_numbers(prefill_tokens_per_s=speeds[0], prefill_flops_per_s=speeds[1])
    return LoadQuestion(request.deadline_ms / 1000, *speeds)


def prefill_of(request: pb.CompleteRequestRequest) -> PrefillRun | None:
    _check_numbers(prefill_s=request.prefill_s)
    if not request.prefill_tokens or not request.prefill_s:
        return None
    return PrefillRun(request.prefill_tokens, request.prefill_s, request.prefill_first_token)


def _check_numbers(**given: float) -> None:
    for name, value in given.items():
        if not 0 <= value < inf:
            raise InvalidArgument(f"a number is out of range: {name}={value}")


def _mixed(layout: Layout, keys: pb.Keys, packed: bytes) -> tuple[bytes, int]:
    """Opaque keys under the request's extra keys become other keys: salts and LoRAs never share a block."""
    if not keys.extra_keys:
        return packed, keys.key_bytes
    root = block_keys.root(layout.digest, list(keys.extra_keys))
    return block_keys.mix_batch(root, packed, keys.key_bytes), block_keys.DIGEST_BYTES


def handles_of(packed: bytes, name: str) -> list[int]:
    values = unpack_u64(packed, name)
    if len(values) > HANDLES_MAX:
        raise InvalidArgument(f"too many in one call: field={name} count={len(values)}")
    return [int(value) for value in values.tolist()]
