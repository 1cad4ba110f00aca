"""Blocks spread over several arrays, as an engine's paged KV cache has them: by shared memory, by gRPC streams and by the bulk channel."""

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstored.client import (
    AsyncClient,
    Client,
    Gather,
    GroupKind,
    GroupSpec,
    InvalidArgument,
    Keys,
    Namespace,
    NamespaceSpec,
    ReadStatus,
)
from kvstored.core.types import CheckpointPolicy
from kvstored.pb import kvstored_pb2 as pb
from tests.transport.fake_daemon import FakeDaemon
from tests.transport.test_front import Front, start_front, stop_front

from .conftest import BLOCK_TOKENS, spec_with

LAYERS, PAGES, HEADS, DIM = 6, 9, 2, 8
RUN_BYTES = BLOCK_TOKENS * HEADS * DIM * 2
LAYER_BYTES = 2 * RUN_BYTES
BLOCK_BYTES = LAYERS * LAYER_BYTES
"""3 units: the fake daemon has it in two extents."""

Layers = list[np.ndarray]


@pytest.fixture(scope="module")
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        fake = FakeDaemon(Path(folder) / "s")
        fake.start()
        yield fake
        fake.kill()


@pytest.fixture(scope="module")
def front(daemon: FakeDaemon) -> Iterator[Front]:
    made = start_front(daemon.path, "127.0.0.1:0")
    yield made
    stop_front(made)


@pytest.fixture(params=["local", "grpc", "bulk"])
def paged(request: pytest.FixtureRequest, daemon: FakeDaemon, front: Front) -> Iterator[Namespace]:
    """A namespace of one group, whose block is a page of every layer, by every way that bytes go."""
    way = request.param
    address = daemon.address if way == "local" else f"{way}://{front.address}"
    with Client(address, timeout_s=10) as client:
        yield opened(client, request.node.name)


@pytest.fixture
def local(client: Client, request: pytest.FixtureRequest) -> Namespace:
    return opened(client, request.node.name)


def opened(client: Client, model: str) -> Namespace:
    """Of one test: the daemon is shared."""
    return client.open_namespace(
        spec_with(GroupSpec("kv", GroupKind.LINEAR, BLOCK_BYTES), model=model)
    )


def layers_of(seed: int | None, pages: int = PAGES) -> Layers:
    """An engine's cache: per layer (K and V, page, token, head, dim); empty without a seed."""
    shape = (2, pages, BLOCK_TOKENS, HEADS, DIM)
    if seed is None:
        return [np.zeros(shape, dtype=np.float16) for _ in range(LAYERS)]
    made = np.random.default_rng(seed)
    return [made.integers(0, 30000, shape, dtype=np.uint16).view(np.float16) for _ in range(LAYERS)]


def runs_of(layers: Layers, page: int) -> list[np.ndarray]:
    """A page as 2 arrays a layer."""
    return [layer[side, page] for layer in layers for side in (0, 1)]


def strided(layers: Layers, page: int) -> list[np.ndarray]:
    """A page as one array a layer, K and V apart in memory."""
    return [layer[:, page] for layer in layers]


def bytes_of(layers: Layers, page: int) -> np.ndarray:
    return np.concatenate([layer[:, page].reshape(-1).view(np.uint8) for layer in layers])


def same(a: Layers, b: Layers, pages: dict[int, int]) -> bool:
    """Whether pages of `b` hold what pages of `a` do, and its other pages nothing."""
    others = [page for page in range(PAGES) if page not in pages.values()]
    return all(
        np.array_equal(x[:, i].view(np.uint16), y[:, j].view(np.uint16))
        for x, y in zip(a, b, strict=True)
        for i, j in pages.items()
    ) and not any(y[:, others].any() for y in b)


def flip(client: Any, namespace: Namespace, keys: Keys) -> None:
    request = pb.ReportRequest(namespace=namespace.digest, keys=keys.message(), group=1)
    client.call("Report", request, pb.ReportResponse)


@pytest.mark.parametrize("pages_of", [runs_of, strided])
@pytest.mark.parametrize("verify", [True, False])
def test_pages_of_an_engine_are_put_from_where_they_lie_and_got_into_others(
    paged: Namespace, pages_of: Any, verify: bool
) -> None:
    cache, other = layers_of(1), layers_of(None)
    keys = paged.keys(range(4 * BLOCK_TOKENS))
    rows = [pages_of(cache, page) for page in (5, 0, 8)]
    assert paged.put_from(keys[:3], rows).committed == 3
    for block, page in zip(paged.get(keys).blocks, (5, 0, 8), strict=False):
        assert block is not None
        assert np.array_equal(block[0], bytes_of(cache, page))
    into = [pages_of(other, page) for page in (1, 2, 3, 4)]
    got = paged.get_into(keys, into, verify=verify)
    assert (got.hits, got.prefix_hits, got.corrupt, got.blocks) == (3, 3, 0, ())
    assert got.filled == ((True,), (True,), (True,), (False,))
    assert same(cache, other, {5: 1, 0: 2, 8: 3})


@pytest.mark.parametrize("verify", [True, False])
def test_a_range_of_layers_fills_those_alone(paged: Namespace, verify: bool) -> None:
    cache, other = layers_of(2), layers_of(None)
    keys = paged.keys(range(2 * BLOCK_TOKENS))
    paged.put(keys, [bytes_of(cache, page) for page in (0, 1)])
    ranges = [(LAYER_BYTES, 2 * LAYER_BYTES), (5 * LAYER_BYTES, LAYER_BYTES)]
    into = [[other[i][:, page] for i in (1, 2, 5)] for page in (0, 1)]
    assert paged.get_into(keys, into, ranges=ranges, verify=verify).hits == 2
    kept = (1, 2, 5)
    assert same([cache[i] for i in kept], [other[i] for i in kept], {0: 0, 1: 1})
    assert not any(other[i].any() for i in (0, 3, 4))


@pytest.mark.parametrize("part", [0, BLOCK_BYTES - 64])
def test_a_range_verifies_as_the_whole_piece(client: Client, local: Namespace, part: int) -> None:
    """The fake daemon flips the first byte, which is inside the one range and outside the other."""
    keys = local.keys(range(2 * BLOCK_TOKENS))
    local.put(keys, np.ones((2, BLOCK_BYTES), dtype=np.uint8))
    flip(client, local, keys[:1])
    into = np.zeros((2, 64), dtype=np.uint8)
    got = local.get_into(keys, into, ranges=[(part, 64)])
    assert (got.hits, got.corrupt) == (1, 1)
    assert got.status[0] is ReadStatus.MISS
    assert got.filled == ((False,), (True,))
    assert local.get_into(keys, into, ranges=[(part, 64)], verify=False).hits == 2


def test_gathers_made_once_serve_every_call(paged: Namespace) -> None:
    cache = layers_of(3)
    pages = [Gather.of(strided(cache, page)) for page in range(PAGES)]
    assert pages[0].size == BLOCK_BYTES
    keys = paged.keys(range(3 * BLOCK_TOKENS))
    wanted = [bytes_of(cache, page) for page in range(3)]
    paged.put_from(keys, pages[:3])
    paged.get_into(keys, pages[6:])
    for page, expected in zip((6, 7, 8), wanted, strict=True):
        assert np.array_equal(bytes_of(cache, page), expected)


def test_every_layout_of_an_array_gives_its_elements_in_order(paged: Namespace) -> None:
    cube = np.arange(BLOCK_BYTES // 4, dtype=np.float32).reshape(8, 24, -1)
    layouts = [
        cube.copy(),
        cube.transpose(2, 0, 1),
        np.asfortranarray(cube),
        cube[::-1, :, ::-1],
        np.repeat(cube, 2, axis=2)[:, :, ::2],
    ]
    keys = paged.keys(range(len(layouts) * BLOCK_TOKENS))
    assert paged.put_from(keys, layouts).committed == len(layouts)
    for block, layout in zip(paged.get(keys).blocks, layouts, strict=True):
        assert block is not None
        assert block[0].tobytes() == layout.tobytes()
    fresh = [np.zeros_like(layout) for layout in layouts]
    holes = [np.zeros((*layout.shape, 3), dtype=np.float32)[..., 1] for layout in layouts]
    for into in (fresh, holes):
        assert paged.get_into(keys, into).hits == len(layouts)
        assert all(np.array_equal(a, b) for a, b in zip(into, layouts, strict=True))


@pytest.mark.parametrize("verify", [True, False])
def test_large_runs_small_ones_and_steps_meet_in_one_piece(paged: Namespace, verify: bool) -> None:
    """Every way through a piece: straight in several steps, by the cache, in an order that changes, over two extents."""
    sizes = [5, 70_000, 3, 4096, (2 << 20) + 11, 40_000, 40_001, 64 << 10, 1]
    piece = np.random.default_rng(5).integers(0, 256, sum(sizes), dtype=np.uint8)
    cuts = np.split(piece, np.cumsum(sizes)[:-1])
    keys = paged.keys(range(3 * BLOCK_TOKENS))
    assert paged.put_from(keys, [[cuts[0].tobytes(), *cuts[1:]], piece, cuts]).committed == 3
    assert all(block and np.array_equal(block[0], piece) for block in paged.get(keys).blocks)
    into: list[Any] = [[np.zeros(size, dtype=np.uint8) for size in sizes] for _ in range(2)]
    into.append(bytearray(len(piece)))
    assert paged.get_into(keys, into, verify=verify).hits == 3
    for row in into[:2]:
        assert np.array_equal(np.concatenate(row), piece)
    assert bytes(into[2]) == piece.tobytes()


def test_groups_have_lists_of_their_own_and_what_a_block_lacks_is_told(
    client: Client,
) -> None:
    namespace = client.open_namespace(
        NamespaceSpec(
            "hybrid",
            "r1",
            "bf16",
            "nhd",
            1,
            BLOCK_TOKENS,
            (GroupSpec("kv", GroupKind.LINEAR, 8192), GroupSpec("state", GroupKind.STATE, 100)),
            checkpoint_policy=CheckpointPolicy.FULL,
        )
    )
    keys = namespace.keys(range(3 * BLOCK_TOKENS))
    kv = np.random.default_rng(6).integers(0, 256, (3, 2, 4096), dtype=np.uint8)
    state = np.arange(100, dtype=np.uint8)
    rows = [(list(kv[0]), None), (kv[1], [state[:30], state[30:]]), (kv[2], state)]
    assert namespace.put_from(keys, rows, groups=["kv", "state"]).committed == 3
    out, states = np.zeros_like(kv), np.zeros((3, 100), dtype=np.uint8)
    into = [(out[0], states[0]), (list(out[1]), states[1]), (out[2], None)]
    got = namespace.get_into(keys, into, groups=["kv", "state"])
    assert got.hits == 3
    assert got.filled == ((True, False), (True, True), (True, False))
    assert np.array_equal(out, kv)
    assert np.array_equal(states[1], state)
    assert not states[[0, 2]].any()
    with pytest.raises(InvalidArgument, match="one list of buffers a selected group"):
        namespace.get_into(keys, [out[0], out[1], out[2, :1]], groups=["kv", "state"])


@pytest.mark.parametrize(
    ("ranges", "sizes", "message"),
    [
        (None, [BLOCK_BYTES - 1], "do not add up"),
        (None, [BLOCK_BYTES, 1], "do not add up"),
        (None, [], "do not add up"),
        ([(0, 64)], [63], "do not add up"),
        ([(BLOCK_BYTES - 10, 20)], [20], "ends behind its piece"),
        ([(0, 10), (20, 10)], [15, 5], "crosses the end of a range"),
        ([(0, 10), (5, 10)], [20], "ascending and apart"),
        ([(10, 0)], [], "ascending and apart"),
        ([(-1, 5)], [5], "ascending and apart"),
        ([], [], "without a range"),
    ],
)
def test_buffers_that_do_not_fit_are_refused_and_nothing_is_written(
    paged: Namespace, ranges: Any, sizes: list[int], message: str
) -> None:
    keys = paged.keys(range(2 * BLOCK_TOKENS))
    paged.put(keys, np.ones((2, BLOCK_BYTES), dtype=np.uint8))
    into = [[np.zeros(size, dtype=np.uint8) for size in sizes] for _ in range(2)]
    if ranges is None:  # the first block fits: it is not filled either
        into[0] = [np.zeros(BLOCK_BYTES, dtype=np.uint8)]
    with pytest.raises(InvalidArgument, match=message):
        paged.get_into(keys, into, ranges=ranges)
    assert not any(each.any() for row in into for each in row)
    assert paged.get(keys).hits == 2  # the connection and the session go on


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (7, "arrays, not int"),
        ([[1, 2]], "array of numbers, not list"),
        (np.array(["x", None], dtype=object), "array of numbers"),
        (np.zeros(4, dtype=np.uint8).data[::2], "not contiguous"),
        (bytes(BLOCK_BYTES), "not writable"),
        (np.broadcast_to(np.zeros(1, dtype=np.uint8), (BLOCK_BYTES,)), "not writable"),
    ],
)
def test_what_is_no_buffer_is_refused(local: Namespace, row: Any, message: str) -> None:
    keys = local.keys(range(BLOCK_TOKENS))
    with pytest.raises(InvalidArgument, match=message):
        local.get_into(keys, [row])
    with pytest.raises(InvalidArgument, match="one row of buffers a key"):
        local.put_from(keys, [])


def test_a_put_in_parts_and_blocks_that_are_there(
    paged: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.client.rows._PART_BYTES_MAX", 2 * BLOCK_BYTES)
    cache, other = layers_of(7), layers_of(None)
    keys = paged.keys(range(7 * BLOCK_TOKENS))
    paged.put(keys[3:4], [bytes_of(cache, 3)])
    result = paged.put_from(keys, [strided(cache, page) for page in range(7)])
    assert (result.committed, result.present) == (6, 1)
    assert paged.get_into(keys, [strided(other, page) for page in range(7)]).hits == 7
    assert same(cache, other, {page: page for page in range(7)})


def test_several_threads_copy_a_large_batch(local: Namespace) -> None:
    rng = np.random.default_rng(8)
    cache = [rng.integers(0, 256, (2, 8, 300_000), dtype=np.uint8) for _ in range(3)]
    other = [np.zeros_like(layer) for layer in cache]
    keys = local.keys(range(8 * BLOCK_TOKENS))
    local.put_from(keys, [strided(cache, page) for page in range(8)])
    for verify in (True, False):
        for layer in other:
            layer[:] = 0
        got = local.get_into(keys, [strided(other, page) for page in range(8)], verify=verify)
        assert got.hits == 8
        assert all(np.array_equal(a, b) for a, b in zip(cache, other, strict=True))


def test_nothing_asked_is_nothing(paged: Namespace) -> None:
    none = paged.keys([])
    assert paged.put_from(none, []).status == ()
    assert paged.get_into(none, []).status == ()


def test_asyncio_has_both(daemon: FakeDaemon) -> None:
    cache, other = layers_of(9), layers_of(None)

    async def main() -> None:
        async with AsyncClient(daemon.address) as client:
            group = GroupSpec("kv", GroupKind.LINEAR, BLOCK_BYTES)
            namespace = await client.open_namespace(spec_with(group, model="asyncio"))
            keys = namespace.keys(range(2 * BLOCK_TOKENS))
            await namespace.put_from(keys, [strided(cache, page) for page in (0, 1)])
            into = [strided(other, page) for page in (4, 5)]
            assert (await namespace.get_into(keys, into)).hits == 2

    asyncio.run(main())
    assert same(cache, other, {0: 4, 1: 5})
