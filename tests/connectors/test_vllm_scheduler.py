"""The scheduler's half of the vLLM connector: what it plans for requests of vLLM's shape, over a lookup that is told what to answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstored.client import GroupKind, GroupSpec, Keys, Match
from kvstored.clock import ManualClock
from kvstored.connectors.vllm_plans import EngineLayout, GroupLayout, Plans
from kvstored.connectors.vllm_scheduler import SchedulerSide, StoredEvents
from kvstored.core.keys import content_keys, root

from .conftest import spec_with

TOKENS = 16
LAYOUT = EngineLayout(
    spec_with(groups=[GroupSpec("0-full", GroupKind.LINEAR, 100)]),
    (GroupLayout("0-full", TOKENS, ("a",), (100,), is_sharded=False),),
    hash_tokens=TOKENS,
)


class Stored:
    """Stands for the daemon: the hashes that it has."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.asked: list[Keys] = []

    def lookup(self, keys: Keys) -> Match:
        self.asked.append(keys)
        hits = next((i for i, key in enumerate(keys) if key not in self.keys), len(keys))
        return Match(
            hits, hits * TOKENS, hits * TOKENS, 0, (0, 1 if hits else 0, max(hits - 1, 0), 0), ""
        )

    def content_keys(
        self, tokens: Sequence[int], first_token: int, extra_keys: Sequence[bytes]
    ) -> tuple[bytes, ...]:
        return tuple(content_keys(root(bytes(32), extra_keys), tokens, TOKENS, first_token))


@dataclass
class Request:
    """`num_tokens` tokens, of which all whole blocks are hashed."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    lora_request: object = None
    all_token_ids: list[int] = field(default_factory=list)
    cache_salt: str | None = None
    mm_features: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all_token_ids = list(range(self.num_tokens))

    @property
    def block_hashes(self) -> Sequence[bytes]:
        return [bytes([i]) * 32 for i in range(self.num_tokens // TOKENS)]


def side(stored: Stored, **changed: object) -> SchedulerSide:
    facts = {"is_layerwise": False, "is_loading": True, "is_storing": True, "events": None}
    return SchedulerSide(LAYOUT, stored, ManualClock(), **{**facts, **changed})  # type: ignore[arg-type]


def admitted(scheduler: SchedulerSide, request: Request, own_tokens: int = 0) -> int:
    """As vLLM does it for a request: asks, gives pages 100, 101, ... and, once loaded, goes on."""
    external = scheduler.matched_tokens(request, own_tokens)
    table = [100 + i for i in range(-(-request.num_tokens // TOKENS))]
    scheduler.allocated(request, [table], external)
    request.num_computed_tokens = own_tokens + external
    return external


def step(scheduler: SchedulerSide, request: Request, tokens: int, drafts: int = 0) -> Plans:
    table = [100 + i for i in range(-(-request.num_tokens // TOKENS))]
    plans = scheduler.planned(
        {request.request_id: tokens}, {request.request_id: [0] * drafts}, lambda _: [table]
    )
    request.num_computed_tokens += tokens - drafts
    return plans


def test_a_new_prompt_is_stored_block_by_block_as_it_is_computed() -> None:
    scheduler, request = side(Stored()), Request("r", 70)
    assert admitted(scheduler, request) == 0
    (first,) = step(scheduler, request, 40).stores
    assert (first.run.first_block, len(first.run.hashes), first.pages) == (
        0,
        2,
        (((100,),), ((101,),)),
    )
    (second,) = step(scheduler, request, 30).stores
    assert (second.run.first_block, second.run.parent, second.pages) == (
        2,
        request.block_hashes[1],
        (((102,),), ((103,),)),
    )


def test_what_is_stored_says_what_its_tokens_are_unless_they_are_not_all() -> None:
    scheduler, request = side(Stored()), Request("r", 70)
    admitted(scheduler, request)
    (first,) = step(scheduler, request, 40).stores
    (second,) = step(scheduler, request, 30).stores
    told = content_keys(root(bytes(32)), request.all_token_ids[:64], TOKENS)
    assert [*first.run.keys().content_keys, *second.run.keys().content_keys] == told
    for number, other in enumerate(
        (Request("s", 70, cache_salt="own"), Request("m", 70, mm_features=["an image"]))
    ):
        admitted(scheduler, other)
        (salted,) = step(scheduler, other, 40).stores
        assert salted.run.keys().content_keys == (), number


def test_a_block_that_decode_fills_is_stored_when_it_seals() -> None:
    scheduler, request = side(Stored()), Request("r", 30)
    admitted(scheduler, request)
    step(scheduler, request, 30)
    for token in (31, 32, 33):
        request.num_tokens = token
        stores = step(scheduler, request, 1).stores
        assert [s.run.first_block for s in stores] == ([1] if token == 32 else [])


def test_draft_tokens_that_may_be_refused_seal_nothing() -> None:
    scheduler, request = side(Stored()), Request("r", 31)
    admitted(scheduler, request)
    step(scheduler, request, 31)
    request.num_tokens = 35
    assert step(scheduler, request, 3, drafts=3).stores == []


def test_what_the_daemon_has_is_loaded_but_never_the_whole_prompt() -> None:
    stored, request = Stored(), Request("r", 64)
    stored.keys = set(request.block_hashes)
    scheduler = side(stored)
    assert admitted(scheduler, request) == 48, "one token at least is computed"
    plans = step(scheduler, request, 16)
    (load,) = plans.loads
    assert (load.run.first_block, load.pages, load.in_step) == (
        0,
        (((100,),), ((101,),), ((102,),)),
        False,
    )
    assert [s.run.first_block for s in plans.stores] == [3], "what was loaded is not stored again"
    assert step(scheduler, request, 0).loads == [], "a plan is for one step"


def test_only_what_the_engine_does_not_have_is_loaded() -> None:
    stored, request = Stored(), Request("r", 70)
    stored.keys = set(request.block_hashes)
    scheduler = side(stored)
    assert admitted(scheduler, request, own_tokens=32) == 32
    (load,) = step(scheduler, request, 6).loads
    assert (load.run.first_block, load.run.parent) == (2, request.block_hashes[1])
    assert load.pages == (((102,),), ((103,),))


def test_what_the_engine_has_and_the_daemon_lost_is_stored_again() -> None:
    stored, request = Stored(), Request("r", 70)
    stored.keys = set(request.block_hashes[:1])
    scheduler = side(stored)
    assert admitted(scheduler, request, own_tokens=48) == 0
    (store,) = step(scheduler, request, 22).stores
    assert (store.run.first_block, len(store.run.hashes)) == (1, 3)


def test_asking_again_changes_nothing_and_is_answered_from_memory_for_a_while() -> None:
    stored, request = Stored(), Request("r", 70)
    stored.keys = set(request.block_hashes)
    scheduler = side(stored)
    assert [scheduler.matched_tokens(request, 0) for _ in range(5)] == [64] * 5
    assert len(stored.asked) == 1
    assert isinstance(scheduler.clock, ManualClock)
    scheduler.clock.advance(1.0)
    stored.keys.clear()
    assert scheduler.matched_tokens(request, 0) == 0
    scheduler.allocated(request, [[1] * 5], 0)
    assert scheduler.planned({}, {}, lambda _: []).loads == []


def test_a_load_that_failed_is_stored_once_it_is_computed() -> None:
    stored, request = Stored(), Request("r", 70)
    stored.keys = set(request.block_hashes)
    scheduler = side(stored)
    admitted(scheduler, request)
    scheduler.planned({}, {}, lambda _: [])
    scheduler.reported(["r"], [], {102})
    request.num_computed_tokens = 32
    (store,) = step(scheduler, request, 38).stores
    assert store.run.first_block == 0


def test_a_request_that_ends_keeps_its_pages_until_its_last_blocks_are_copied() -> None:
    scheduler, request = side(Stored()), Request("r", 40)
    admitted(scheduler, request)
    step(scheduler, request, 20)
    request.num_tokens, request.num_computed_tokens = 48, 47
    assert scheduler.finished(request, [[100, 101, 102]])
    (store,) = scheduler.planned({}, {}, lambda _: []).stores
    assert (store.run.first_block, len(store.run.hashes), store.is_last) == (1, 1, True)
    assert not scheduler.finished(request, [[]]), "nothing is known of it any more"


def test_the_last_token_is_never_taken_for_computed() -> None:
    scheduler, request = side(Stored()), Request("r", 20)
    admitted(scheduler, request)
    step(scheduler, request, 20)
    request.num_tokens, request.num_computed_tokens = 32, 32
    assert not scheduler.finished(request, [[100, 101]])


def test_a_request_that_is_aborted_while_it_loads_leaves_nothing() -> None:
    stored, request = Stored(), Request("r", 70)
    stored.keys = set(request.block_hashes[2:])
    scheduler = side(stored)
    assert admitted(scheduler, request, own_tokens=32) == 32
    assert not scheduler.finished(request, [[100, 101, 102, 103]])
    assert scheduler.planned({}, {}, lambda _: []).stores == []


def test_a_preempted_request_is_loaded_again_and_not_stored_twice() -> None:
    stored, request = Stored(), Request("r", 70)
    scheduler = side(stored)
    admitted(scheduler, request)
    step(scheduler, request, 70)
    stored.keys = set(request.block_hashes)
    assert admitted(scheduler, request) == 64
    plans = step(scheduler, request, 6)
    assert len(plans.loads) == 1
    assert plans.stores == []


def test_the_roles_of_vllm_are_kept() -> None:
    stored, request = Stored(), Request("r", 70)
    stored.keys = set(request.block_hashes)
    assert admitted(side(stored, is_loading=False), request) == 0
    consumer = side(Stored(), is_storing=False)
    admitted(consumer, request)
    assert step(consumer, request, 70).stores == []
    assert not consumer.finished(request, [[1] * 5])


def test_hits_are_told_by_tier_and_add_up() -> None:
    stored, request = Stored(), Request("r", 70)
    stored.keys = set(request.block_hashes)
    scheduler = side(stored)
    external = admitted(scheduler, request)
    assert scheduler.hit_tokens_by_tier(request, external) == {1: 16, 2: 48}
    assert scheduler.hit_tokens_by_tier(request, 16) == {1: 16}
    assert scheduler.hit_tokens_by_tier(request, 80) == {1: 16, 2: 48, -1: 16}
    assert scheduler.hit_tokens_by_tier(Request("other", 70), 16) == {}


def test_an_adapter_s_weights_are_in_the_key(tmp_path: Path) -> None:
    stored, keys = Stored(), []
    scheduler = side(stored)
    for i, content in enumerate((b"one", b"two", b"one")):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(content)
        lora = SimpleNamespace(lora_int_id=i, lora_path=str(folder), lora_name="same")
        scheduler.matched_tokens(Request(f"r{i}", 70, lora_request=lora), 0)
        keys.append(stored.asked[-1].extra_keys)
    assert keys[0] == keys[2]
    assert keys[0] != keys[1]


def test_an_event_comes_when_every_worker_has_stored_its_part() -> None:
    events = StoredEvents(workers=2)
    scheduler, request = side(Stored(), events=events), Request("r", 40)
    admitted(scheduler, request)
    step(scheduler, request, 40)
    first, second = request.block_hashes
    assert events.stored({first: 1, second: 1, b"unknown!": 1}) == []
    told = events.stored({second: 1})
    assert [(key, each.parent, each.tokens) for key, each in told] == [
        (second, first, tuple(range(16, 32)))
    ]
    assert events.stored({second: 2}) == [], "once"


def test_after_a_reset_nothing_from_before_is_found_nor_stored_under_its_key() -> None:
    """vLLM resets its cache after weights were changed in place: the fingerprint of their files does not know."""
    scheduler, request = side(stored := Stored()), Request("r", 70)
    scheduler.matched_tokens(request, 0)
    scheduler.reset()
    scheduler.matched_tokens(request, 0)
    before, after = [keys.extra_keys for keys in stored.asked]
    assert (before, len(after)) == ((), 1)
    admitted(scheduler, request)
    (store,) = step(scheduler, request, 70).stores
    assert store.run.extra_keys == after
    scheduler.reset()
    scheduler.matched_tokens(Request("s", 70), 0)
    assert stored.asked[-1].extra_keys not in (before, after)


@pytest.mark.parametrize("tokens", [0, 15])
def test_a_prompt_shorter_than_a_block_is_not_asked_for(tokens: int) -> None:
    stored = Stored()
    assert side(stored).matched_tokens(Request("r", tokens), 0) == 0
    assert stored.asked == []
