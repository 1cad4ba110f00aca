"""Copies in C beside those in Python: the same bytes, the same checksums, whatever the sizes and however the memory is cut."""

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import xxhash

from kvstored import native
from kvstored.client import copying, scatter
from kvstored.client.copying import Copier, Run
from kvstored.client.scatter import Gather, Walk
from kvstored.errors import Corrupt
from kvstored.wire.packing import pack_u64

Bytes = np.ndarray
SIZES = [
    *range(1, 300),
    *(1024 * n + d for n in (1, 2, 4, 15, 16, 17, 64) for d in (-65, -64, -1, 0, 1, 63, 64, 65)),
    (1 << 20) + 1,
    (3 << 20) + 777,
]


def random_bytes(rng: random.Random, size: int, offset: int = 0) -> Bytes:
    return np.frombuffer(rng.randbytes(size + offset), dtype=np.uint8)[offset:].copy()


def empty(size: int, offset: int) -> Bytes:
    return np.zeros(size + offset, dtype=np.uint8)[offset:]


def placed(size: int, offset: int) -> Bytes:
    """So many bytes behind the begin of a cache line."""
    memory = np.zeros(size + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + size]


@pytest.mark.parametrize("past_cache", [False, True])
def test_checksums_are_those_of_xxhash_at_every_size_and_alignment(
    copies: native.Copies, past_cache: bool
) -> None:
    rng = random.Random(1)
    for size in SIZES:
        source = random_bytes(rng, size, size % 7)
        target = empty(size + 2, size % 33 if size % 2 else 0)
        middle = target[1:-1]
        run = (middle, (source,), (size,))
        assert copies.copy_runs([run], False, True, past_cache) == [
            xxhash.xxh3_64_intdigest(source.data)
        ]
        assert np.array_equal(middle, source)
        middle[:] = 0
        run = (source, (middle,), (size,))
        assert copies.copy_runs([run], True, False, past_cache) == []
        assert np.array_equal(middle, source)
        assert (target[0], target[-1]) == (0, 0)


def test_stores_past_the_caches_write_the_bytes_and_no_others_wherever_they_begin(
    copies: native.Copies,
) -> None:
    """A numpy array of some MiB begins 16 bytes behind a page: other stores than where it is a multiple of 32."""
    size = 40_000
    source = random_bytes(random.Random(2), size)
    for offset in range(64):
        for summed in (False, True):
            memory = placed(size + 200, offset)
            run = (memory[100:-100], (source,), (size,))
            sums = copies.copy_runs([run], False, summed, True)
            assert sums == [xxhash.xxh3_64_intdigest(source.data)] * summed
            assert np.array_equal(memory[100:-100], source)
            assert not memory[:100].any()
            assert not memory[-100:].any()


def cuts(rng: random.Random, total: int, count: int) -> list[tuple[int, int]]:
    inner = sorted(rng.sample(range(1, total), min(count - 1, total - 1)))
    return list(pairwise([0, *inner, total]))


@pytest.mark.parametrize("seed", range(30))
def test_runs_of_several_pieces_or_several_extents_are_copied_as_in_python(
    copies: native.Copies, seed: int
) -> None:
    rng = random.Random(seed)
    total = rng.choice([5, 700, 5000, 100_000])
    parts = cuts(rng, total, rng.randint(1, 5))
    sides = []
    for _ in range(2):
        private, shared = random_bytes(random.Random(seed), total), empty(total, seed)
        sizes = tuple(b - a for a, b in parts)
        run = Run(private, (shared,), sizes)
        if seed % 2:
            run = Run(private, tuple(shared[a:b] for a, b in parts), (total,))
        sides.append((run, shared, empty(total, 3)))
    (plain, there, back), (mine, my_there, my_back) = sides
    past_cache = seed % 3 == 0
    assert copies.copy_runs([mine], True, True, past_cache) == copying._copy_in(plain)
    assert np.array_equal(there, my_there)
    out, my_out = plain._replace(private=back), mine._replace(private=my_back)
    assert copies.copy_runs([my_out], False, True, past_cache) == copying.copied_out(out)
    assert np.array_equal(back, my_back)
    assert np.array_equal(back, plain.private)


def page(rng: random.Random, layers: int, run_bytes: int, kind: int) -> list[Bytes]:
    """Buffers of one block: rows, rows two by two with a gap, or 16-bit numbers."""
    if kind == 0:
        return [empty(run_bytes, rng.randint(0, 40)) for _ in range(layers)]
    if kind == 1:
        return [np.zeros((2, 3, run_bytes), dtype=np.uint8)[:, 1] for _ in range(layers)]
    return [np.zeros((3, 4, run_bytes // 2), dtype=np.uint16)[::-1, 1] for _ in range(layers)]


@pytest.mark.parametrize("seed", range(40))
def test_blocks_over_many_buffers_are_carried_as_in_python(
    copies: native.Copies, seed: int
) -> None:
    rng = random.Random(seed)
    layers, run_bytes, kind = rng.randint(1, 6), rng.choice([256, 1000, 1024, 70_000]), seed % 3
    shape = random.Random(seed)
    ours, theirs = (page(random.Random(seed), layers, run_bytes, kind) for _ in range(2))
    gather, other = Gather.of(ours), Gather.of(theirs)
    assert gather.spread is not None
    total = gather.size
    source = random_bytes(shape, total)
    extents = tuple(source[a:b] for a, b in cuts(rng, total, rng.randint(1, 4)))
    ranges = None
    walks = Walk(extents, gather, ranges), Walk(extents, other, ranges)
    check(copies, *walks, past_cache=seed % 2 == 0)
    for mine, yours in zip(ours, theirs, strict=True):
        assert np.array_equal(mine, yours)
    assert np.array_equal(gather.joined(), source)
    back, plain = empty(total, 5), empty(total, 1)
    put = (back,), gather.spread, None
    assert copies.copy_walks([put], True, True, False) == scatter.gather(
        Walk((plain,), gather, None)
    )
    assert np.array_equal(back, plain)
    assert np.array_equal(back, source)


def check(copies: native.Copies, walk: Walk, plain: Walk, *, past_cache: bool) -> None:
    assert walk.gather.spread is not None
    given = (walk.shared, walk.gather.spread, walk.ranges)
    checksums = copies.copy_walks([given], False, True, past_cache)
    assert checksums == scatter.scatter(plain)
    assert copies.copy_walks([given], False, False, past_cache) == []


@pytest.mark.parametrize("rest", [1, 63, 64, 65])
@pytest.mark.parametrize("border", [1, 960, 1000, 1023, 1024])
def test_borders_near_the_end_of_a_block(copies: native.Copies, rest: int, border: int) -> None:
    """The last stripe begins before what is left of a sum, in what a border cut or in what did not."""
    source = random_bytes(random.Random(rest), 2 * 1024 + rest)
    for cut in (border, 1024 + border):
        if cut < source.size:
            walks = [
                Walk((source,), Gather.of([empty(cut, 0), empty(source.size - cut, 0)]), None)
                for _ in range(2)
            ]
            check(copies, *walks, past_cache=False)


@pytest.mark.parametrize("seed", range(30))
def test_ranges_of_a_block_verify_as_the_whole_and_fill_only_their_buffers(
    copies: native.Copies, seed: int
) -> None:
    rng = random.Random(seed)
    total = rng.choice([2000, 9000, 200_000])
    source = random_bytes(rng, total)
    parts = cuts(rng, total, 7)
    wanted = sorted(rng.sample(parts, 3))
    ranges = tuple((a, b - a) for a, b in wanted)
    buffers = [[empty(b - a, 1) for a, b in wanted] for _ in range(2)]
    extents = tuple(source[a:b] for a, b in cuts(rng, total, 2))
    walks = [Walk(extents, Gather.of(each), ranges) for each in buffers]
    check(copies, walks[0], walks[1], past_cache=False)
    for (a, b), buffer in zip(wanted, buffers[0], strict=True):
        assert np.array_equal(buffer, source[a:b])
    whole = walks[0]._replace(ranges=None)
    assert whole.gather.spread is not None
    with pytest.raises(ValueError, match="fit"):
        copies.copy_walks([(whole.shared, whole.gather.spread, None)], False, True, False)


@pytest.mark.parametrize("offset", [0, 16])
def test_the_checksum_is_that_of_the_copy_whatever_becomes_of_the_source_meanwhile(
    copies: native.Copies, offset: int
) -> None:
    size, stop = 100_000 + 12 * 13_000, threading.Event()
    shared, target = np.zeros(size, dtype=np.uint8), placed(size, offset)
    versions = [random_bytes(random.Random(seed), size) for seed in range(2)]
    # large runs are summed as they are loaded, small ones where they were copied to
    small = [empty(13_000, 0) for _ in range(12)]
    spread = copies.spread((target[:100_000], *small))
    assert spread is not None

    def write() -> None:
        while not stop.is_set():
            for version in versions:
                np.copyto(shared, version)

    writer = threading.Thread(target=write, daemon=True)  # it outlives a failure
    writer.start()
    torn = 0
    ends_s = time.monotonic() + 1
    while time.monotonic() < ends_s:
        for past_cache in (False, True):
            run, walk = (target, (shared,), (size,)), ((shared,), spread, None)
            sums = copies.copy_runs([run], False, True, past_cache)
            assert sums == [xxhash.xxh3_64_intdigest(target.data)]
            torn += not any(np.array_equal(target, version) for version in versions)
            sums = copies.copy_walks([walk], False, True, past_cache)
            private = np.concatenate([target[:100_000], *small])
            assert sums == [xxhash.xxh3_64_intdigest(private.data)]
    stop.set()
    writer.join()
    assert torn > 0


def test_what_does_not_fit_is_refused_before_the_first_byte(copies: native.Copies) -> None:
    source, target = np.ones(4096, dtype=np.uint8), np.zeros(4096, dtype=np.uint8)
    spread = copies.spread((target[:1000],))
    assert spread is not None
    good = (target, (source,), (4096,))
    for bad in (
        (target[1:], (source,), (4095,)),
        (target, (source,), (4095,)),
        (target, (source,), (4096, 1)),
        (target, (source[:100], source[100:]), (4000, 96)),
        (target, (source,), (2**63, 1)),
    ):
        with pytest.raises((ValueError, OverflowError)):
            copies.copy_runs([good, bad], False, True, False)
    for ranges in (
        None,
        ((0, 999),),
        ((4000, 1000),),
        ((0, 500), (400, 500)),
        ((-5, 1000),),
        ((0, -1), (0, 1001)),
        ((2**62, 1000),),
    ):
        with pytest.raises(ValueError, match="fit"):
            copies.copy_walks([((source,), spread, ranges)], False, True, False)
    source.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        copies.copy_runs([good, (target, (source,), (4096,))], True, True, False)
    frozen = copies.spread((source,))
    assert frozen is not None
    with pytest.raises(ValueError, match="writable"):
        copies.copy_walks([((target,), frozen, None)], False, True, False)
    assert not target.any()


def test_references_to_objects_are_no_bytes(copies: native.Copies) -> None:
    objects, source = np.full(512, None, dtype=object), np.ones(4096, dtype=np.uint8)
    with pytest.raises(ValueError, match="objects"):
        copies.spread((objects,))
    with pytest.raises(ValueError, match="objects"):
        copies.copy_runs([(objects, (source,), (4096,))], False, True, False)
    assert set(objects) == {None}


def test_short_steps_are_left_to_numpy(copies: native.Copies) -> None:
    assert copies.spread((np.zeros((64, 64), dtype=np.uint8)[:, :32],)) is None
    assert Gather.of(np.zeros((64, 64), dtype=np.uint8)[:, ::2]).spread is None
    assert Gather.of([np.zeros(3, dtype=np.uint8)] * 9).spread is not None


@pytest.fixture(params=["in C", "in Python"])
def copier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Copier:
    if request.param == "in C":
        request.getfixturevalue("copies")
    else:
        monkeypatch.setattr(native, "copies", None)
    return Copier(3)


def extents_of(*extents: tuple[int, int, int]) -> bytes:
    return pack_u64([each for extent in extents for each in extent])


@pytest.mark.parametrize("size", [1, 4096, 65536, 1 << 20])
def test_places_are_filled_in_any_order_and_segment(copier: Copier, size: int) -> None:
    rng = random.Random(size)
    sources = [random_bytes(rng, size, offset=i) for i in range(18)]
    segments = {n: empty(9 * size + 2, 0) for n in (3, 7)}
    extents = [(3 + 4 * (i % 2), i // 2 * size + 1, size) for i in range(18)]
    rng.shuffle(extents)
    sums = copier.fill(sources, segments, extents_of(*extents))
    assert sums == pack_u64([xxhash.xxh3_64_intdigest(each.data) for each in sources])
    for source, (number, offset, _) in zip(sources, extents, strict=True):
        assert np.array_equal(segments[number][offset : offset + size], source)
    for segment in segments.values():
        assert segment[0] == segment[-1] == 0


@pytest.mark.parametrize(
    ("extent", "error"),
    [
        ((8, 0, 64), LookupError),
        ((7, 65, 64), (LookupError, Corrupt)),
        ((7, 2**64 - 32, 64), (LookupError, Corrupt)),
        ((7, 0, 63), (LookupError, Corrupt)),
        ((7, 0, 2**64 - 1), (LookupError, Corrupt)),
    ],
)
def test_no_byte_goes_where_no_place_is(
    copier: Copier, extent: tuple[int, int, int], error: type[Exception]
) -> None:
    memory = empty(192, 0)
    sources = [np.full(64, 1, dtype=np.uint8)] * 2
    with pytest.raises(error):
        copier.fill(sources, {7: memory[32:160]}, extents_of((7, 0, 64), extent))
    assert not memory.any()


def test_calls_that_make_no_sense_fill_nothing(copies: native.Copies) -> None:
    memory, source = empty(64, 0), np.full(64, 1, dtype=np.uint8)
    place = extents_of((0, 0, 64))
    read_only = memory.view()
    read_only.flags.writeable = False
    for sources, segment, extents in (
        ([source, source], memory, place),
        ([source], memory, place[:-1]),
        ([None], memory, place),
        ([np.full(128, 1, dtype=np.uint8)[::2]], memory, place),
        ([source], read_only, place),
    ):
        with pytest.raises((ValueError, TypeError, BufferError)):
            copies.fill(sources, {0: segment}, extents, True)  # type: ignore[arg-type]  # wrong ones on purpose
    assert not memory.any()


def test_a_large_batch_is_shared_by_threads_and_keeps_its_order(copier: Copier) -> None:
    rng = random.Random(4)
    size = 1 << 20
    sources = [random_bytes(rng, size) for _ in range(17)]
    shared = [empty(size, 0) for _ in sources]
    runs = [Run(a, (b,), (size,)) for a, b in zip(sources, shared, strict=True)]
    right = [xxhash.xxh3_64_intdigest(each.data) for each in sources]
    assert copier.copy_in(runs) == right
    memory = empty(17 * size, 0)
    places = extents_of(*[(0, i * size, size) for i in range(17)])
    assert copier.fill(sources, {0: memory}, places) == pack_u64(right)
    assert np.array_equal(memory, np.concatenate(sources))
    back = [run._replace(private=empty(size, 0)) for run in runs]
    assert copier.copy_out(back) == right
    assert copier.copy_out_unchecked(back) == []
    assert all(np.array_equal(a, run.private) for a, run in zip(sources, back, strict=True))
    walks = [Walk(run.shared, Gather.of(empty(size, 1)), None) for run in runs]
    assert scatter.scatter_all(walks, copier, checked=True) == right
    assert scatter.gather_all(walks, copier) == right
    copier.close()


def test_no_share_of_a_copy_that_was_interrupted_runs_on(copier: Copier) -> None:
    """An interrupt while the caller waited for the other threads left them writing to memory that was given back: space of other blocks, or a
    caller's buffer."""
    begun, free = threading.Event(), threading.Event()
    ended: list[int] = []

    def copy(first: int, _: int) -> list[int]:
        if first == 0:
            begun.wait(10)
            interrupt.start()
            return [0]
        begun.set()
        free.wait(10)
        ended.append(first)
        return [first]

    def interrupted_twice() -> None:
        for _ in range(2):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            seen.wait(10)
            seen.clear()
        free.set()

    def handler(*_: object) -> None:
        seen.set()
        raise KeyboardInterrupt

    interrupt, seen = threading.Thread(target=interrupted_twice), threading.Event()
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            copier.in_shares([copier.parallel_bytes] * 3, copy)
        assert sorted(ended) in ([1], [1, 2]), "a share that had not begun never does"
        count = len(ended)
        copier.close()
        interrupt.join(10)
        assert len(ended) == count
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("extents", [1, 3])
def test_one_large_block_is_shared_by_threads_where_nothing_is_summed(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, extents: int
) -> None:
    size = (16 << 20) + 777
    source, target = random_bytes(random.Random(6), size), empty(size, 0)
    shared = tuple(source[a:b] for a, b in cuts(random.Random(7), size, extents))
    shares, in_shares = list[int](), copier.in_shares

    def seen(sizes: Sequence[int], copy: Callable[[int, int], list[int]]) -> list[int]:
        shares.extend(sizes)
        return in_shares(sizes, copy)

    monkeypatch.setattr(copier, "in_shares", seen)
    assert copier.copy_out_unchecked([Run(target, shared, (size,))]) == []
    assert np.array_equal(target, source)
    assert len(shares) >= 3
    assert max(shares) - size // 3 <= 4096
    copier.close()


def test_gathers_of_memory_that_c_does_not_take_go_by_numpy_beside_others(copier: Copier) -> None:
    even, odd = np.zeros((64, 64), dtype=np.uint8)[:, ::2], empty(2048, 0)
    source = random_bytes(random.Random(5), 2048)
    walks = [Walk((source,), Gather.of(each), None) for each in (even, odd)]
    right = xxhash.xxh3_64_intdigest(source.data)
    assert scatter.scatter_all(walks, copier, checked=True) == [right, right]
    assert np.array_equal(even.reshape(-1), odd)


def test_the_switch_and_another_layout_leave_it_to_python(
    copies: native.Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    for told in ("off", "OFF", "0", "no"):
        assert native._loaded(told) == (None, f"off: KVSTORED_NATIVE={told}")
    assert native._loaded("")[0] is copies
    monkeypatch.setattr(native, "_LAYOUT", (*native._LAYOUT[:-1], 9))
    assert native._loaded("")[0] is None
