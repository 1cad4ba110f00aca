from typing import Any

import numpy as np
import pytest

from kvstored.client import (
    Client,
    FillStatus,
    GroupKind,
    GroupSpec,
    Keys,
    Namespace,
    ReadStatus,
)
from kvstored.errors import (
    Conflict,
    InvalidArgument,
    NamespaceMismatch,
    NotFound,
)
from kvstored.pb import kvstored_pb2 as pb

from .conftest import BLOCK_TOKENS, spec_with


def rows_of(count: int, size: int = 8192, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, size), dtype=np.uint8)


def test_what_was_put_is_matched_and_read_back(namespace: Namespace) -> None:
    keys = namespace.keys(range(5 * BLOCK_TOKENS))
    rows = rows_of(5)
    assert namespace.match(keys).hit_blocks == 0
    assert namespace.put(keys, rows).status == (FillStatus.COMMITTED,) * 5
    found = namespace.match(keys)
    assert (found.hit_blocks, found.hit_tokens) == (5, 5 * BLOCK_TOKENS)
    got = namespace.get(keys)
    assert (got.hits, got.prefix_hits, got.corrupt) == (5, 5, 0)
    assert got.tiers == b"\x01" * 5
    for block, row in zip(got.blocks, rows, strict=True):
        assert block is not None
        assert np.array_equal(block[0], row)


def test_a_second_put_finds_the_blocks_present(namespace: Namespace) -> None:
    keys = namespace.keys(range(2 * BLOCK_TOKENS))
    namespace.put(keys, rows_of(2))
    again = namespace.put(keys, rows_of(2, seed=1))
    assert again.status == (FillStatus.PRESENT,) * 2
    assert (again.committed, again.stored) == (0, 2)
    block = namespace.get(keys).blocks[0]
    assert block is not None
    assert np.array_equal(block[0], rows_of(2)[0])


def test_a_block_that_another_session_fills_is_in_progress(
    client: Client, namespace: Namespace
) -> None:
    keys = namespace.keys(range(BLOCK_TOKENS))
    request = pb.ReserveRequest(
        session=client.session(),
        namespace=namespace.digest,
        keys=keys.message(),
        sizes=(8192).to_bytes(8, "little"),
    )
    client.call("Reserve", request, pb.ReserveResponse)
    with Client(client.address) as other:
        result = other.open_namespace(namespace.spec).put(keys, rows_of(1))
        assert result.status == (FillStatus.IN_PROGRESS,)


def test_a_full_store_is_a_result_and_leaves_nothing_behind(
    client: Client, namespace: Namespace
) -> None:
    keys = namespace.keys(range(40 * BLOCK_TOKENS))
    result = namespace.put(keys, rows_of(40, 2 << 20))
    assert result.status.count(FillStatus.NO_SPACE) == 9
    assert result.committed == 31
    assert client.call("Stat", pb.StatRequest(), pb.StatResponse).fills == 0


def test_a_miss_in_the_middle_ends_the_prefix(namespace: Namespace) -> None:
    keys = namespace.keys(range(4 * BLOCK_TOKENS))
    namespace.put(keys[:1], rows_of(1))
    namespace.put(keys[2:], rows_of(2))
    got = namespace.get(keys)
    assert [block is not None for block in got.blocks] == [True, False, True, True]
    assert (got.hits, got.prefix_hits, got.miss_reason) == (3, 1, "never-stored")
    assert got.status[1] is ReadStatus.MISS


def test_several_groups_keep_their_bytes_apart_and_may_be_left_out(client: Client) -> None:
    namespace = client.open_namespace(
        spec_with(
            GroupSpec("kv", GroupKind.LINEAR, 3 * 4096),
            GroupSpec("state", GroupKind.STATE, 5000),
            GroupSpec("csa", GroupKind.COMPRESSED, 100, ratio=4),
            model="hybrid",
        )
    )
    keys = namespace.keys(range(2 * BLOCK_TOKENS))
    kv, csa = rows_of(2, 3 * 4096), rows_of(2, 100, seed=1)
    state = np.arange(1250, dtype=np.float32)
    rows = [(kv[0], None, csa[0]), (kv[1], state, csa[1])]
    put = namespace.put(keys, rows, groups=["csa", "kv", "state"])
    assert put.committed == 2
    got = namespace.get(keys, groups=["kv", "state", "csa"])
    first, second = got.blocks
    assert first is not None
    assert second is not None
    assert first[1] is None
    assert np.array_equal(first[0], kv[0])
    assert np.array_equal(second[1].view(np.float32), state)
    assert np.array_equal(second[2], csa[1])


def test_a_partial_last_block_has_its_own_key_and_size(namespace: Namespace) -> None:
    keys = namespace.keys(range(BLOCK_TOKENS + 3))
    assert (len(keys), keys.last_valid_tokens) == (2, 3)
    assert keys[:1].last_valid_tokens == 0
    assert keys[1:].parent == keys.keys[0]
    rows = [rows_of(1)[0], rows_of(1, 1536, seed=1)[0]]
    namespace.put(keys, rows)
    got = namespace.get(keys)
    assert got.blocks[1] is not None
    assert np.array_equal(got.blocks[1][0], rows[1])


def test_extra_keys_and_opaque_keys_are_other_blocks(namespace: Namespace) -> None:
    plain = namespace.keys(range(BLOCK_TOKENS))
    salted = namespace.keys(range(BLOCK_TOKENS), [b"salt"])
    opaque = Keys.opaque([b"engine-hash-0001"], unchained=True)
    namespace.put(plain, rows_of(1))
    assert namespace.get(salted).hits == 0
    namespace.put(opaque, rows_of(1, seed=2))
    block = namespace.get(opaque).blocks[0]
    assert block is not None
    assert np.array_equal(block[0], rows_of(1, seed=2)[0])


def test_extra_keys_are_text_or_bytes_or_none(namespace: Namespace) -> None:
    tokens = range(BLOCK_TOKENS)
    assert namespace.keys(tokens, ["salt", b"x"]) == namespace.keys(tokens, [b"salt", "x"])
    assert namespace.keys(tokens, None) == namespace.keys(tokens)
    assert Keys.opaque([bytes(32)], extra_keys=["salt"]).extra_keys == (b"salt",)


@pytest.mark.parametrize("given", ["salt", b"salt", 7, [7], [None]])
def test_extra_keys_that_are_no_sequence_of_text_are_refused(
    namespace: Namespace, given: Any
) -> None:
    """One text was taken for a sequence of its characters."""
    with pytest.raises(InvalidArgument, match="str or bytes"):
        namespace.keys(range(BLOCK_TOKENS), given)


def test_what_is_not_keys_is_refused_with_what_to_pass(namespace: Namespace) -> None:
    keys = namespace.keys(range(2 * BLOCK_TOKENS))
    given: Any = list(keys)
    for call in (namespace.match, namespace.get, namespace.locate, namespace.remove):
        with pytest.raises(InvalidArgument, match=r"namespace.keys\(tokens\)"):
            call(given)
    with pytest.raises(InvalidArgument, match=r"namespace.keys\(tokens\)"):
        namespace.put(given, rows_of(2))
    index: Any = 0
    with pytest.raises(InvalidArgument, match=r"keys\[0:1\]"):
        keys[index]
    one: Any = bytes(32)
    with pytest.raises(InvalidArgument, match="sequence of bytes"):
        Keys.opaque(one)


def test_arrays_of_objects_and_rows_that_are_none_are_refused(namespace: Namespace) -> None:
    keys = namespace.keys(range(BLOCK_TOKENS))
    objects: Any = np.array([[1, "a"]], dtype=object)
    with pytest.raises(InvalidArgument, match="array of objects"):
        namespace.put(keys, objects)
    number: Any = [7]
    with pytest.raises(InvalidArgument, match="a row is an array"):
        namespace.put(keys, number)


def test_rows_may_be_buffers_other_dtypes_or_not_contiguous(namespace: Namespace) -> None:
    keys = namespace.keys(range(3 * BLOCK_TOKENS))
    strided = rows_of(1, 16384)[0][::2]
    rows = [b"\x07" * 8192, np.ones(2048, dtype=np.float32), strided]
    assert namespace.put(keys, rows).committed == 3
    first, second, third = (block[0] for block in namespace.get(keys).blocks if block)
    assert bytes(first) == b"\x07" * 8192
    assert np.array_equal(second.view(np.float32), np.ones(2048, dtype=np.float32))
    assert np.array_equal(third, strided)


def test_get_copies_into_arrays_of_the_caller(namespace: Namespace) -> None:
    keys = namespace.keys(range(3 * BLOCK_TOKENS))
    rows = rows_of(2)
    namespace.put(keys[:2], rows)
    out = np.zeros((3, 8192), dtype=np.uint8)
    got = namespace.get(keys, out=out)
    assert got.hits == 2
    assert np.array_equal(out[:2], rows)
    assert not out[2].any()
    small = [np.zeros(10, dtype=np.uint8)] * 3
    with pytest.raises(InvalidArgument, match="at least bytes=8192"):
        namespace.get(keys, out=small)


@pytest.mark.parametrize("verify", [True, False])
def test_bytes_that_changed_in_memory_are_a_miss_when_verified(
    client: Client, namespace: Namespace, verify: bool
) -> None:
    keys = namespace.keys(range(3 * BLOCK_TOKENS))
    namespace.put(keys, rows_of(3))
    flip = pb.ReportRequest(namespace=namespace.digest, keys=keys[1:2].message(), group=1)
    client.call("Report", flip, pb.ReportResponse)
    got = namespace.get(keys, verify=verify)
    assert [block is not None for block in got.blocks] == [True, not verify, True]
    assert got.corrupt == int(verify)


def test_large_batches_are_copied_by_several_threads(namespace: Namespace) -> None:
    keys = namespace.keys(range(9 * BLOCK_TOKENS))
    rows = rows_of(9, (3 << 20) + 5)
    assert namespace.put(keys, rows).committed == 9
    for verify in (True, False):
        got = namespace.get(keys, verify=verify)
        assert all(
            block is not None and np.array_equal(block[0], row)
            for block, row in zip(got.blocks, rows, strict=True)
        )


def test_replacing_needs_the_current_generation(namespace: Namespace) -> None:
    keys = namespace.keys(range(BLOCK_TOKENS))
    assert namespace.replace_if(keys, rows_of(1), [0]).committed == 1
    generation = namespace.locate(keys).generations[0]
    assert generation == namespace.get(keys).generations[0] > 0
    with pytest.raises(Conflict):
        namespace.replace_if(keys, rows_of(1), [generation + 1])
    assert namespace.replace_if(keys, rows_of(1, seed=1), [generation]).committed == 1
    block = namespace.get(keys).blocks[0]
    assert block is not None
    assert np.array_equal(block[0], rows_of(1, seed=1)[0])


def test_every_other_call_reaches_the_daemon(client: Client, namespace: Namespace) -> None:
    keys = namespace.keys(range(2 * BLOCK_TOKENS))
    namespace.put(keys, rows_of(2))
    pinned = namespace.pin(keys, ttl_s=60, hard=True)
    assert (pinned.blocks, namespace.unpin(pinned.pin), namespace.unpin(99)) == (2, True, False)
    assert namespace.prefetch(keys, deadline_s=1).job == 3
    assert namespace.touch(keys) == 2
    assert namespace.locate(keys).tiers == (2, 2)
    request = namespace.begin_request(keys)
    assert namespace.extend_request(request, keys) == 5
    assert namespace.complete_request(request, discard=True) == 1
    assert namespace.begin_request(keys, request_id=b"mine") == b"mine"
    assert namespace.remove(keys[:1]) == 1
    assert namespace.clear() == 1


def test_bad_calls_are_refused_before_anything_is_reserved(
    client: Client, namespace: Namespace
) -> None:
    keys = namespace.keys(range(2 * BLOCK_TOKENS))
    for rows in (rows_of(1), [(b"x", b"y"), (b"x", b"y")], [1, 2], [object(), b"x"]):
        with pytest.raises((InvalidArgument, TypeError)):
            namespace.put(keys, rows)
    with pytest.raises(InvalidArgument, match="no such group"):
        namespace.get(keys, groups=["kv", "typo"])
    with pytest.raises(InvalidArgument, match="keys=10000"):
        namespace.get(namespace.keys(range(10_000 * BLOCK_TOKENS)))
    with pytest.raises(NamespaceMismatch):
        client.open_namespace(spec_with(GroupSpec("kv", GroupKind.LINEAR, 1)))
    with pytest.raises(NotFound):
        client.call("Match", pb.MatchRequest(namespace=b"?" * 32), pb.MatchResponse)
    assert client.call("Stat", pb.StatRequest(), pb.StatResponse).fills == 0


def test_an_empty_call_is_an_empty_result(namespace: Namespace) -> None:
    none = namespace.keys([])
    assert namespace.put(none, []).status == ()
    assert namespace.get(none).blocks == ()
    assert namespace.match(none).hit_blocks == 0


def test_a_put_in_parts_keeps_the_path_chained(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.client.rows._PART_BYTES_MAX", 3 * 8192)
    keys = namespace.keys(range(8 * BLOCK_TOKENS))
    rows = rows_of(8)
    namespace.put(keys[4:5], rows[4:5])
    result = namespace.put(keys, rows)
    assert (result.committed, result.stored) == (7, 8)
    got = namespace.get(keys)
    assert all(np.array_equal(b[0], row) for b, row in zip(got.blocks, rows, strict=True) if b)
    assert got.hits == 8
