"""The worker's half of the vLLM connector over a real daemon, with pages that are numpy arrays."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvstored.client import Gather, GroupKind, GroupSpec
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.connectors.vllm_plans import (
    EngineLayout,
    GroupLayout,
    Load,
    Plans,
    Store,
    pages_of,
    run_of,
)
from kvstored.connectors.vllm_worker import Done, WorkerSide
from tests.crash.served import Served, wait_until

from .conftest import Open, spec_with

TOKENS = 16
LAYERS = tuple(f"layer.{i}" for i in range(8))
LAYER_BYTES = 512
LAYOUT = EngineLayout(
    spec_with(groups=[GroupSpec("0-full", GroupKind.LINEAR, LAYER_BYTES * len(LAYERS))]),
    (GroupLayout("0-full", TOKENS, LAYERS, (LAYER_BYTES,) * len(LAYERS), is_sharded=False),),
    hash_tokens=TOKENS,
)
HASHES = [bytes([i]) * 32 for i in range(6)]


class Pages:
    """As GroupPages, without torch."""

    def __init__(self, seed: int) -> None:
        self.layers = np.random.default_rng(seed).integers(
            0, 256, (len(LAYERS), 20, LAYER_BYTES), dtype=np.uint8
        )

    def source(self, pages: Sequence[int]) -> Gather:
        return Gather.of([layer[page] for layer in self.layers for page in pages])

    def target(self, pages: Sequence[int], layers: slice) -> "Pages.Piece":
        return Pages.Piece(
            Gather.of([layer[page] for layer in self.layers[layers] for page in pages])
        )

    class Piece:
        def __init__(self, gather: Gather) -> None:
            self.gather = gather

        def finish(self) -> None:
            return


class Worker:
    def __init__(self, guarded: GuardedNamespace, seed: int) -> None:
        assert guarded.connected(20)
        self.guarded = guarded
        self.pages = Pages(seed)
        self.side = WorkerSide(LAYOUT, guarded, shard=0, tells_stored=True)
        self.side.register((self.pages,))  # type: ignore[arg-type]  # the shape is enough

    def step(self, loads: Sequence[Load] = (), stores: Sequence[Store] = ()) -> Done:
        plans = Plans(list(loads), list(stores))
        self.side.start_loads(plans)
        for layer in LAYERS:
            self.side.wait_for_layer(layer)
        self.side.end_step()
        self.side.copy_stores(plans)
        return self.side.take_done()

    def loaded(self, wanted: Load) -> Done:
        """Steps until the load is reported."""
        found = [self.step(loads=[wanted])]

        def is_loaded() -> bool:
            if wanted.request not in found[-1].loaded:
                found.append(self.step())
            return wanted.request in found[-1].loaded

        wait_until(is_loaded, 20)
        return found[-1]


def load(request: str, first_page: int, *, in_step: bool = False, blocks: int = 4) -> Load:
    table = [first_page + i for i in range(blocks)]
    run = run_of(HASHES, LAYOUT, 0, blocks)
    return Load(request, run, pages_of([table], LAYOUT, 0, blocks), in_step)


def store(request: str, first_page: int, *, blocks: int = 4, is_last: bool = False) -> Store:
    table = [first_page + i for i in range(blocks)]
    run = run_of(HASHES, LAYOUT, 0, blocks)
    return Store(request, run, pages_of([table], LAYOUT, 0, blocks), is_last)


@pytest.fixture
def first(served: Served, guard: Open) -> Worker:
    """Has stored four blocks, of its pages 1 to 4."""
    worker = Worker(guard(LAYOUT.spec), seed=1)
    worker.step(stores=[store("a", 1)])
    assert worker.guarded.flush(20)
    return worker


@pytest.fixture
def second(first: Worker, guard: Open) -> Worker:
    return Worker(guard(LAYOUT.spec), seed=2)


def same(one: Worker, pages: slice, other: Worker, others: slice) -> bool:
    return np.array_equal(one.pages.layers[:, pages], other.pages.layers[:, others])


def test_stored_blocks_are_told_once(first: Worker) -> None:
    assert first.step().stored == HASHES[:4]
    assert first.step().stored == []


def test_a_load_beside_the_steps(first: Worker, second: Worker) -> None:
    done = second.loaded(load("b", 10))
    assert (done.failed, done.failed_pages) == (set(), set())
    assert same(second, slice(10, 14), first, slice(1, 5))


def test_a_load_within_the_step_is_whole_when_its_layers_are_asked_for(
    first: Worker, second: Worker
) -> None:
    done = second.step(loads=[load("b", 10, in_step=True)])
    assert (done.loaded, done.failed_pages) == (set(), set())
    assert same(second, slice(10, 14), first, slice(1, 5))
    assert second.guarded.statistics.totals()["loaded_blocks"] == pytest.approx(4)


def test_a_failed_load_names_its_pages(first: Worker, second: Worker) -> None:
    gone = store("a", 1).run.keys()[2:3]
    assert first.guarded.attempt(lambda namespace: namespace.remove(gone), 0) == 1
    done = second.loaded(load("b", 10))
    assert done.failed == {"b"}
    assert 12 in done.failed_pages
    assert not {10, 11} & done.failed_pages


def test_nothing_is_stored_of_a_step_in_which_a_load_failed(first: Worker, second: Worker) -> None:
    """What a step computes over pages that did not come is wrong, and other requests may have shared them."""
    first.guarded.attempt(lambda namespace: namespace.clear(), 0)
    before = second.guarded.statistics.totals()["stores"]
    done = second.step(loads=[load("b", 10, in_step=True)], stores=[store("c", 15)])
    assert done.failed_pages == {10, 11, 12, 13}
    assert second.guarded.flush(20)
    assert second.guarded.statistics.totals()["stores"] == before
    second.step(stores=[store("c", 15)])
    assert second.guarded.flush(20)
    assert second.guarded.lookup(store("c", 15).run.keys()).hit_blocks == 4, "the next step's are"


def test_the_last_store_of_a_request_is_reported_whatever_became_of_it(
    served: Served, first: Worker
) -> None:
    served.kill_daemon()
    assert first.step(stores=[store("a", 1, is_last=True)]).sent == {"a"}


def test_a_load_without_pages_or_daemon_ends(served: Served, guard: Open, first: Worker) -> None:
    bare = WorkerSide(LAYOUT, first.guarded, shard=0, tells_stored=False)
    bare.start_loads(Plans([load("b", 10)], []))
    done = bare.take_done()
    assert (done.loaded, done.failed_pages) == ({"b"}, {10, 11, 12, 13})
    served.kill_daemon()
    first.guarded.lookup(store("a", 1).run.keys())
    # It may have come back meanwhile, warm.
    assert first.loaded(load("b", 10)).failed_pages in (set(), {10, 11, 12, 13})


def test_only_the_first_rank_stores_what_is_replicated(first: Worker) -> None:
    other = WorkerSide(LAYOUT, first.guarded, shard=1, tells_stored=False)
    other.register((first.pages,))  # type: ignore[arg-type]  # as above
    before = first.guarded.statistics.totals()["stores"]
    other.copy_stores(Plans([], [store("z", 5)]))
    assert first.guarded.flush(20)
    assert first.guarded.statistics.totals()["stores"] == before
