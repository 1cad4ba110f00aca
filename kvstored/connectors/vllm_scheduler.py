"""The scheduler's half of the vLLM connector: what is found, what is loaded, what is stored. Plans only; the workers move bytes.

Runs in vLLM's scheduling loop: one lookup a new request, by its deadline, and arithmetic.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from kvstored.client import Match
from kvstored.clock import Clock
from kvstored.connectors import identity
from kvstored.connectors.guarded import NO_MATCH, GuardedNamespace
from kvstored.connectors.vllm_plans import (
    EngineLayout,
    Load,
    Page,
    Plans,
    Run,
    Store,
    hashed_blocks,
    pages_of,
    run_of,
)

_FRESH_S = 0.5
"""A request that cannot be scheduled is asked about again in every step: its last answer counts for so long."""
_ADAPTERS_MAX = 1024
_EXPECTED_MAX = 65_536

TablesOf = Callable[[str], Sequence[Sequence[Page]]]
"""Page numbers of a request by its id, one list a group."""


class Request(Protocol):
    """What is read of vLLM's request."""

    request_id: str
    block_hashes: Sequence[bytes]
    all_token_ids: Sequence[int]
    num_tokens: int
    num_computed_tokens: int
    lora_request: Any  # vLLM's LoRARequest
    cache_salt: str | None
    mm_features: Sequence[object]


@dataclass(slots=True)
class _Found:
    """The last lookup of a request, past what the engine has itself."""

    first_tokens: int
    first_block: int
    match: Match
    at_s: float


@dataclass(slots=True)
class _Running:
    """`stored_blocks`: of the path, from its start, that are stored or on their way. `load`: the last one, of which nothing is known yet."""

    request: Request
    stored_blocks: int
    found: Match = NO_MATCH
    load: Load | None = None


@dataclass(slots=True)
class _Expected:
    """What an event about a block says, and how many workers have stored their part of it."""

    parent: bytes
    tokens: tuple[int, ...]
    lora: tuple[int, str] | None
    stored: int = 0


class StoredEvents:
    """Blocks that are on their way to the daemon, until every worker that has a part of them has stored it. Bounded: the oldest are forgotten."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._expected: OrderedDict[bytes, _Expected] = OrderedDict()

    def expect(self, run: Run, request: Request, block_tokens: int) -> None:
        lora = request.lora_request
        named = None if lora is None else (int(lora.lora_int_id), str(lora.lora_name))
        parent = run.parent
        for i, key in enumerate(run.hashes, run.first_block):
            tokens = tuple(request.all_token_ids[i * block_tokens : (i + 1) * block_tokens])
            self._expected[key] = _Expected(parent, tokens, named)
            parent = key
        while len(self._expected) > _EXPECTED_MAX:
            self._expected.popitem(last=False)

    def stored(self, counts: Mapping[bytes, int]) -> list[tuple[bytes, _Expected]]:
        """Those that are whole now."""
        whole = []
        for key, count in counts.items():
            expected = self._expected.get(key)
            if expected is None:
                continue
            expected.stored += count
            if expected.stored >= self._workers:
                whole.append((key, self._expected.pop(key)))
        return whole


@dataclass(slots=True)
class SchedulerSide:
    layout: EngineLayout
    guarded: GuardedNamespace
    clock: Clock
    is_layerwise: bool
    is_loading: bool
    is_storing: bool
    events: StoredEvents | None
    _found: dict[str, _Found] = field(default_factory=dict)
    _running: dict[str, _Running] = field(default_factory=dict)
    _plans: Plans = field(default_factory=Plans)
    _adapters: dict[tuple[int, str], str] = field(default_factory=dict)
    _since_reset: tuple[bytes, ...] = ()

    # ---- admission

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """Tokens that can be loaded past those that the engine has. Changes nothing that counts."""
        if not self.is_loading:
            return 0
        found = self._found.get(request.request_id)
        if (
            found is None
            or found.first_tokens != computed_tokens
            or self.clock.elapsed_s() - found.at_s > _FRESH_S
        ):
            found = self._looked_up(request, computed_tokens)
            self._found[request.request_id] = found
        first = found.first_block * self.layout.block_tokens
        return max(first + found.match.checkpoint_tokens - computed_tokens, 0)

    def allocated(
        self, request: Request, tables: Sequence[Sequence[Page]], external_tokens: int
    ) -> None:
        """`tables`: the request's page numbers, one list a group, None for a page that is not there. May come twice."""
        found = self._found.pop(request.request_id, None)
        running = self._running.get(request.request_id)
        if running is None:
            own_tokens = 0 if found is None else found.first_tokens
            running = _Running(request, self._stored_before(request, own_tokens))
            self._running[request.request_id] = running
        if not external_tokens or found is None:
            return
        first, last = (
            found.first_block,
            (found.first_tokens + external_tokens) // self.layout.block_tokens,
        )
        if first >= last:
            return
        running.found = found.match
        if running.stored_blocks >= first:
            running.stored_blocks = max(running.stored_blocks, last)
        running.load = Load(
            request.request_id,
            run_of(request.block_hashes, self.layout, first, last, self._extra_keys(request)),
            pages_of(tables, self.layout, first, last, from_token=found.first_tokens),
            in_step=self.is_layerwise,
        )
        self._plans.loads.append(running.load)

    def hit_tokens_by_tier(self, request: Request, external_tokens: int) -> Mapping[int, int]:
        """Of the load planned last for this request: tokens by TierId; -1 for what is not known."""
        running = self._running.get(request.request_id)
        if running is None or not external_tokens:
            return {}
        tokens: dict[int, int] = {}
        left = external_tokens
        for tier, blocks in enumerate(running.found.tier_blocks):
            taken = min(blocks * self.layout.block_tokens, left)
            left -= taken
            if taken:
                tokens[tier] = taken
        return {**tokens, -1: left} if left else tokens

    def reset(self) -> None:
        """Nothing that was stored before is found by this engine again, nor what its workers store late; other engines keep theirs."""
        self._since_reset = (b"reset:" + secrets.token_bytes(16),)
        self._found.clear()

    # ---- steps

    def planned(
        self,
        scheduled_tokens: Mapping[str, int],
        draft_tokens: Mapping[str, Sequence[int]],
        tables_of: TablesOf,
    ) -> Plans:
        """What the workers have to do with this step; the next one begins anew."""
        for request_id, tokens in scheduled_tokens.items():
            running = self._running.get(request_id)
            if running is None or not self.is_storing:
                continue
            sure = running.request.num_computed_tokens + tokens
            sure -= len(draft_tokens.get(request_id, ()))
            self._plan_store(running, sure, tables_of, is_last=False)
        plans, self._plans = self._plans, Plans()
        return plans

    def reported(
        self, loaded: Iterable[str], failed: Iterable[str], pages: AbstractSet[int]
    ) -> None:
        """What became of loads. What did not come is stored again, once it is computed."""
        for request_id in failed:
            self._forget_stored(self._running.get(request_id))
        if pages:
            for each in self._running.values():
                if each.load is not None and _touches(each.load, pages):
                    self._forget_stored(each)
        for request_id in loaded:
            if (running := self._running.get(request_id)) is not None:
                running.load = None

    def finished(self, request: Request, tables: Sequence[Sequence[Page]]) -> bool:
        """Whether the request's pages have to be kept until its last store is reported."""
        self._found.pop(request.request_id, None)
        running = self._running.pop(request.request_id, None)
        if running is None or not self.is_storing or _is_on_its_way(running.load):
            return False
        # The last token was never an input: its KV is not there.
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        return self._plan_store(running, computed, lambda _: tables, is_last=True)

    def _plan_store(
        self, running: _Running, computed_tokens: int, tables_of: TablesOf, *, is_last: bool
    ) -> bool:
        request, layout = running.request, self.layout
        first = running.stored_blocks
        hashed = hashed_blocks(request.block_hashes, layout)
        last = min(computed_tokens // layout.block_tokens, hashed)
        if first >= last:
            return False
        running.stored_blocks = last
        pages = pages_of(tables_of(request.request_id), layout, first, last)
        run = run_of(request.block_hashes, layout, first, last, self._extra_keys(request))
        run = replace(run, content_keys=self._content_keys(request, first, last))
        self._plans.stores.append(Store(request.request_id, run, pages, is_last))
        if self.events is not None:
            self.events.expect(run, request, layout.block_tokens)
        return True

    @staticmethod
    def _forget_stored(running: _Running | None) -> None:
        if running is not None and running.load is not None:
            running.stored_blocks = min(running.stored_blocks, running.load.run.first_block)

    # ---- inside

    def _looked_up(self, request: Request, computed_tokens: int) -> _Found:
        layout = self.layout
        first = computed_tokens // layout.block_tokens
        # One token at least has to be computed, or there would be nothing to sample from.
        last = min(
            (request.num_tokens - 1) // layout.block_tokens,
            hashed_blocks(request.block_hashes, layout),
        )
        match = NO_MATCH
        if first < last:
            extra = self._extra_keys(request)
            run = run_of(request.block_hashes, layout, first, last, extra)
            match = self.guarded.lookup(run.keys())
        return _Found(computed_tokens, first, match, self.clock.elapsed_s())

    def _stored_before(self, request: Request, own_tokens: int) -> int:
        """Blocks that the engine has itself and the daemon has too: what it lost, or never got, is stored again."""
        blocks = own_tokens // self.layout.block_tokens
        if not blocks or not self.is_storing:
            return 0
        extra = self._extra_keys(request)
        run = run_of(request.block_hashes, self.layout, 0, blocks, extra)
        return self.guarded.lookup(run.keys()).hit_blocks

    def _content_keys(self, request: Request, first: int, last: int) -> tuple[bytes, ...]:
        """None where tokens do not say what a block contains, or where a salt keeps it apart."""
        if request.cache_salt is not None or request.mm_features:
            return ()
        begin, end = (i * self.layout.block_tokens for i in (first, last))
        extra = self._extra_keys(request)
        return self.guarded.content_keys(request.all_token_ids[begin:end], begin, extra)

    def _extra_keys(self, request: Request) -> tuple[bytes, ...]:
        """vLLM's hashes hold salt, images, and an adapter's name and path; the adapter's weights come in here."""
        lora = request.lora_request
        if lora is None:
            return self._since_reset
        known = (int(lora.lora_int_id), str(lora.lora_path))
        if known not in self._adapters:
            if len(self._adapters) >= _ADAPTERS_MAX:
                self._adapters.clear()
            self._adapters[known] = identity.weights_fingerprint(Path(lora.lora_path))
        return identity.extra_keys(lora=self._adapters[known]) + self._since_reset


def _touches(load: Load, pages: AbstractSet[int]) -> bool:
    return any(page in pages for row in load.pages for numbers in row for page in numbers)


def _is_on_its_way(load: Load | None) -> bool:
    """Pages of a load that has not been reported hold anything."""
    return load is not None and not load.in_step
