"""Blocks that are gone are remembered by run, so many at most, the youngest."""

from array import array

from kvstored.core.policies.ghosts import Ghost, Ghosts


def ghost(*lows: int, uses: int = 1) -> Ghost:
    return Ghost(array("Q", lows), 0, 0.0, 0.0, uses, 0)


def test_ghosts_are_bounded_by_runs_and_the_oldest_leave() -> None:
    ghosts = Ghosts(runs_max=10)
    for low in range(100):
        ghosts.add(ghost(low))
    assert len(ghosts) == 10
    assert [low for low in range(100) if low in ghosts] == list(range(90, 100))


def test_ghosts_are_bounded_by_blocks() -> None:
    ghosts = Ghosts(blocks_max=100)
    for low in range(0, 1000, 7):
        ghosts.add(ghost(*range(low, low + 7)))
        assert ghosts.blocks <= 100
    assert 994 in ghosts


def test_a_ghost_is_taken_once() -> None:
    ghosts = Ghosts()
    ghosts.add(ghost(5, 6))
    found = ghosts.take(5)
    assert found is not None
    assert found.lows.tolist() == [5, 6]
    assert ghosts.take(5) is None
    assert ghosts.blocks == 0


def test_what_leaves_from_right_above_with_the_same_history_is_one_ghost() -> None:
    ghosts = Ghosts()
    ghosts.add(ghost(7, 8))
    ghosts.add(ghost(5, 6), below=7)
    found = ghosts.take(5)
    assert found is not None
    assert found.lows.tolist() == [5, 6, 7, 8]
    assert len(ghosts) == 0


def test_what_was_used_since_is_a_ghost_of_its_own() -> None:
    ghosts = Ghosts()
    ghosts.add(ghost(7, 8))
    ghosts.add(ghost(5, 6, uses=2), below=7)
    assert len(ghosts) == 2
    assert ghosts.blocks == 4


def test_it_tells_where_none_of_many_begins_a_ghost() -> None:
    ghosts = Ghosts()
    ghosts.add(ghost(5, 6))
    assert ghosts.are_none_of([6, 7])
    assert not ghosts.are_none_of([7, 5])
