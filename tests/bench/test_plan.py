from bench.peers.plan import (
    BATCH_BYTES_MAX,
    COLD,
    KEPT_BLOCKS_MAX,
    MIB,
    WARM,
    Shape,
    size_words,
    visits,
)

CONTESTANTS = [("copy", WARM), ("store", WARM), ("store, disk", COLD)]


def _plan(seed: int) -> list[object]:
    return list(visits(CONTESTANTS, [4096, MIB], [1, 64], [1, 4], 3, seed))


def test_every_round_visits_every_contestant_once_at_every_size_with_every_shape() -> None:
    plan = visits(CONTESTANTS, [4096, MIB], [1, 64], [1, 4], 3, seed=1)
    for round_ in range(3):
        visited = [(v.contestant, v.block_bytes) for v in plan if v.round_ == round_]
        assert sorted(visited) == sorted((n, s) for n, _ in CONTESTANTS for s in (4096, MIB))
    for visit in plan:
        shapes = {(s.batch, s.clients) for s in visit.shapes}
        assert shapes == {(1, 1), (1, 4), (64, 1), (64, 4)}
        assert {s.block_bytes for s in visit.shapes} == {visit.block_bytes}


def test_the_order_is_the_seeds_and_differs_between_rounds() -> None:
    assert _plan(1) == _plan(1)
    assert _plan(1) != _plan(2)
    plan = visits(CONTESTANTS, [MIB], [1], [1], 6, seed=1)
    orders = {tuple(v.contestant for v in plan if v.round_ == r) for r in range(6)}
    assert len(orders) > 1


def test_all_of_one_size_in_a_round_follow_each_other() -> None:
    sizes = [v.block_bytes for v in visits(CONTESTANTS, [4096, MIB], [1], [1], 1, seed=3)]
    assert sizes in ([4096] * 3 + [MIB] * 3, [MIB] * 3 + [4096] * 3)


def test_a_batch_of_all_clients_stays_under_the_cap_and_says_so() -> None:
    assert Shape(32 * MIB, 64, 1).blocks == 8
    assert Shape(32 * MIB, 64, 4).blocks == 2
    assert Shape(512 * MIB, 64, 1).blocks == 1
    assert Shape(MIB, 64, 4).blocks == 64
    for clients in (1, 4):
        shape = Shape(32 * MIB, 64, clients)
        assert shape.batch_bytes * clients <= BATCH_BYTES_MAX
    assert Shape(32 * MIB, 64, 1).words == "32 MiB x 64 (capped: 8)"
    assert Shape(MIB, 64, 1).words == "1 MiB x 64"


def test_sets_are_many_for_small_batches_and_few_for_large_ones() -> None:
    assert Shape(4096, 1, 1).sets == 256
    assert Shape(4096, 64, 1).sets * 64 == KEPT_BLOCKS_MAX
    assert Shape(32 * MIB, 64, 1).sets == 3


def test_a_visit_asks_for_twice_what_is_stored_at_a_time() -> None:
    (warm,) = visits([("store", WARM)], [32 * MIB], [64], [1], 1, seed=1)
    assert warm.capacity_bytes == 2 * 3 * 256 * MIB
    (cold,) = visits([("store", COLD)], [MIB], [1, 64], [1], 1, seed=1)
    assert cold.capacity_bytes == max(512 * MIB, 2 * (32 + 3 * 64) * MIB)


def test_sizes_are_written_in_their_largest_unit() -> None:
    words = [size_words(size) for size in (4096, MIB, 32 * MIB, 100)]
    assert words == ["4 KiB", "1 MiB", "32 MiB", "100 B"]
