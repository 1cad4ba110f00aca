"""Blocks that are gone are remembered by run, so many at most, the youngest."""

import gc
from array import array

from kvstored.core.policies.ghosts import Ghosts


def add(ghosts: Ghosts, *lows: int, uses: int = 1, below: int = -1) -> None:
    ghosts.add(lows[0], (array("Q", lows).tobytes(), 0, 0.0, 0.0, uses, 0), below=below)


def test_ghosts_are_bounded_by_runs_and_the_oldest_leave() -> None:
    ghosts = Ghosts(runs_max=10)
    for low in range(100):
        add(ghosts, low)
    assert len(ghosts) == 10
    assert [low for low in range(100) if low in ghosts] == list(range(90, 100))


def test_ghosts_are_bounded_by_blocks() -> None:
    ghosts = Ghosts(blocks_max=100)
    for low in range(0, 1000, 7):
        add(ghosts, *range(low, low + 7))
        assert ghosts.blocks <= 100
    assert 994 in ghosts


def test_a_ghost_is_taken_once() -> None:
    ghosts = Ghosts()
    add(ghosts, 5, 6)
    found = ghosts.take(5)
    assert found is not None
    assert found.lows.tolist() == [5, 6]
    assert ghosts.take(5) is None
    assert ghosts.blocks == 0


def test_what_leaves_from_right_above_with_the_same_history_is_one_ghost() -> None:
    ghosts = Ghosts()
    add(ghosts, 7, 8)
    add(ghosts, 5, 6, below=7)
    found = ghosts.take(5)
    assert found is not None
    assert found.lows.tolist() == [5, 6, 7, 8]
    assert len(ghosts) == 0


def test_what_was_used_since_is_a_ghost_of_its_own() -> None:
    ghosts = Ghosts()
    add(ghosts, 7, 8)
    add(ghosts, 5, 6, uses=2, below=7)
    assert len(ghosts) == 2
    assert ghosts.blocks == 4


def test_it_tells_where_none_of_many_begins_a_ghost() -> None:
    ghosts = Ghosts()
    add(ghosts, 5, 6)
    assert ghosts.are_none_of([6, 7])
    assert not ghosts.are_none_of([7, 5])


def test_a_ghost_that_is_given_back_has_lost_what_was_used() -> None:
    ghosts = Ghosts()
    add(ghosts, 5, 6, 7)
    found = ghosts.take(5)
    assert found is not None
    ghosts.give_back(found, 2)
    assert (5 in ghosts, 7 in ghosts, ghosts.blocks) == (False, True, 1)


def test_the_collector_has_nothing_to_look_at() -> None:
    """65,536 ghosts, each an object with an array, once made a full collection 40 ms longer."""
    ghosts = Ghosts()
    gc.collect()
    before = len(gc.get_objects())
    for low in range(0, 20_000, 2):
        add(ghosts, low, low + 1)
    gc.collect()
    assert len(ghosts) == 10_000
    assert len(gc.get_objects()) - before < 100
