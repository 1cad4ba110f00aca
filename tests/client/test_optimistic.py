"""Gets without a message, from a real daemon: what they read is right, and what they may not read they acquire."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstored import native
from kvstored.client import Client, Keys, Namespace, ReadStatus
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from tests.crash.blocks import content_of, is_right, spec_of
from tests.crash.served import ROOT, Served, environment, wait_until

SIZE = 16 << 10


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("served"), dram="64MiB", disk="0B") as served:
        yield served


@pytest.fixture(params=["in C", "in Python"])
def client(
    request: pytest.FixtureRequest, served: Served, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Client]:
    if request.param == "in Python":
        monkeypatch.setattr(native, "copies", None)
    elif native.copies is None:
        pytest.skip(f"the client's copies in C are not here: {native.state}")
    with Client(served.address) as client:
        yield client


@pytest.fixture
def namespace(client: Client) -> Iterator[Namespace]:
    namespace = client.open_namespace(spec_of(SIZE))
    yield namespace
    namespace.clear()


def put(namespace: Namespace, count: int, salt: int = 0) -> Keys:
    keys = [(salt << 32 | n).to_bytes(32, "big") for n in range(count)]
    size = namespace.spec.groups[0].bytes_per_block
    assert namespace.put(Keys.opaque(keys), [content_of(key, size) for key in keys]).stored == count
    namespace.match(Keys.opaque(keys))  # blocks are shown a moment after their put is answered
    return Keys.opaque(keys)


def calls(client: Client) -> float:
    counters = client.call("Stat", pb.StatRequest(), pb.StatResponse).counters
    return sum(value for name, value in counters.items() if name.startswith("read_keys"))


@pytest.mark.parametrize("count", [1, 3, 4, 100])
def test_a_get_without_a_message_answers_as_one_by_acquire(
    client: Client, namespace: Namespace, count: int
) -> None:
    keys = put(namespace, count)
    by_acquire = namespace.get(keys, optimistic=False)
    got = namespace.get(keys)
    assert client.optimistic_reads().hits == count
    assert got.hits == count
    assert (got.status, got.tiers, got.generations, got.miss_reason, got.corrupt) == (
        by_acquire.status,
        by_acquire.tiers,
        by_acquire.generations,
        by_acquire.miss_reason,
        by_acquire.corrupt,
    )
    assert all(is_right(key, block[0]) for key, block in zip(keys, got.blocks, strict=True))


@pytest.mark.parametrize("count", [4, 100])
@pytest.mark.parametrize("size", [4096, 5000, SIZE])
def test_blocks_go_where_the_caller_wants_them(client: Client, size: int, count: int) -> None:
    namespace = client.open_namespace(spec_of(size))
    keys = put(namespace, count, salt=size)
    right = [content_of(key, size) for key in keys]
    rows = np.zeros((count, size), dtype=np.uint8)
    strided = np.zeros((count, 2 * size), dtype=np.uint8)
    outs = (
        rows,
        list(np.zeros((count, size), dtype=np.uint8)),
        [bytearray(size) for _ in keys],
        strided[:, size:],
        np.zeros((count, size // 2), dtype=np.uint16),
    )
    for out in outs:
        got = namespace.get(keys, out=out)
        assert got.hits == count
        for given, row, block in zip(out, right, got.blocks, strict=True):
            assert bytes(given) == row.tobytes()
            assert block is not None
            assert np.array_equal(block[0], row)
    assert client.optimistic_reads().hits == len(outs) * count
    assert not strided[:, :size].any()
    with pytest.raises(InvalidArgument):
        namespace.get(keys, out=np.zeros((count - 1, size), dtype=np.uint8))
    rows.flags.writeable = False
    with pytest.raises(InvalidArgument):
        namespace.get(keys, out=rows)


def test_a_large_read_is_shared_by_threads(client: Client) -> None:
    namespace, count = client.open_namespace(spec_of(1 << 20)), 18
    keys = put(namespace, count, salt=9)
    right = [content_of(key, 1 << 20) for key in keys]
    got = namespace.get(keys)
    assert all(np.array_equal(r, b[0]) for r, b in zip(right, got.blocks, strict=True) if b)
    halves = np.zeros((2, count, 1 << 19), dtype=np.uint8)
    assert namespace.get_into(keys, list(halves.swapaxes(0, 1))).hits == got.hits == count
    assert np.array_equal(np.concatenate(list(halves), axis=1), right)
    assert client.optimistic_reads().hits == 2 * count
    namespace.clear()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_buffers_are_filled_without_a_message(
    client: Client, namespace: Namespace, count: int
) -> None:
    keys, half = put(namespace, count), SIZE // 2
    pages = np.zeros((2, count, half), dtype=np.uint8)
    into = [[pages[0, i], pages[1, i]] for i in range(count)]
    before = calls(client)
    got = namespace.get_into(keys, into)
    assert (got.hits, got.filled, got.blocks) == (count, ((True,),) * count, ())
    assert (calls(client), client.optimistic_reads().hits) == (before, count)
    for i, key in enumerate(keys):
        assert is_right(key, np.concatenate([pages[0, i], pages[1, i]]))
    part = np.zeros((count, 100), dtype=np.uint8)
    assert namespace.get_into(keys, [[row] for row in part], ranges=[(half, 100)]).hits == count
    assert np.array_equal(part, pages[1, :, :100])
    with pytest.raises(InvalidArgument):
        namespace.get_into(keys, [[row[:-1]] for row in pages[0]])


def test_buffers_are_filled_by_acquire_where_a_key_is_not_shown(
    client: Client, namespace: Namespace
) -> None:
    keys = put(namespace, 5)
    missing = Keys.opaque([*keys, b"never stored".ljust(32)], unchained=True)
    rows = np.zeros((6, SIZE), dtype=np.uint8)
    got = namespace.get_into(missing, [[row] for row in rows])
    assert got.filled == ((True,),) * 5 + ((False,),)
    assert all(is_right(key, row) for key, row in zip(keys, rows, strict=False))
    assert client.optimistic_reads().hits == 0


@pytest.mark.parametrize("count", [2, 40])
def test_what_is_not_shown_is_acquired_and_both_make_one_answer(
    client: Client, namespace: Namespace, count: int
) -> None:
    keys = put(namespace, count)
    missing = Keys.opaque([*keys, b"never stored".ljust(32)], unchained=True)
    out = [np.zeros(SIZE, dtype=np.uint8) for _ in missing]
    got = namespace.get(missing, out=out)
    assert [block is not None for block in got.blocks] == [True] * count + [False]
    assert (got.status[-1], got.tiers[-1], got.generations[-1]) == (ReadStatus.MISS, 255, 0)
    assert got.miss_reason == "never-stored"
    assert all(is_right(key, row) for key, row in zip(keys, out, strict=False))
    reads = client.optimistic_reads()
    assert (reads.hits, reads.absent) == (count, 1)


def test_removed_keys_miss_at_once_for_every_client(
    served: Served, client: Client, namespace: Namespace
) -> None:
    with Client(served.address) as other:
        theirs = other.open_namespace(namespace.spec)
        for turn in range(50):
            keys = put(namespace, 8, salt=turn)
            with theirs.get_view(keys):  # somebody reads it meanwhile, so its space is not free yet
                assert theirs.get(keys).hits == 8
                namespace.remove(keys)
                assert theirs.get(keys).hits == 0
        assert other.optimistic_reads().hits == 50 * 8


def test_a_get_that_need_not_verify_goes_without_a_message_too(
    client: Client, namespace: Namespace
) -> None:
    keys = put(namespace, 8)
    before = calls(client)
    got = namespace.get(keys, verify=False)
    assert got.hits == client.optimistic_reads().hits == 8
    assert got.verified
    assert calls(client) == before
    assert not namespace.get(keys, verify=False, optimistic=False).verified


def test_a_mutable_namespace_and_salted_reads_are_acquired(client: Client) -> None:
    mutable = client.open_namespace(replace(spec_of(SIZE), model="mutable", mutable=True))
    assert mutable.get(put(mutable, 4)).hits == 4
    plain = client.open_namespace(spec_of(SIZE))
    keys = put(plain, 4)
    assert plain.get(Keys.opaque(list(keys), extra_keys=["salt"])).hits == 0
    assert plain.get(keys, optimistic=False).hits == 4
    assert plain.get(keys, groups=["kv"]).hits == 4
    assert client.optimistic_reads().hits == 0


def test_a_client_that_wants_none_reads_by_acquire(served: Served) -> None:
    with Client(served.address, optimistic=False) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        keys = put(namespace, 4)
        assert namespace.get(keys).hits == 4
        assert client.optimistic_reads().hits == 0
        assert namespace.get(keys, optimistic=True).hits == 4
        assert client.optimistic_reads().hits == 4


def test_the_daemon_hears_of_every_hit(client: Client, namespace: Namespace) -> None:
    keys = put(namespace, 8)
    before = calls(client)
    for _ in range(30):
        namespace.get(keys)
    wait_until(lambda: calls(client) == before + 240, what="the hits are told")
    assert client.optimistic_reads().untold == 0


def test_bytes_that_are_not_what_was_put_are_never_answered(
    client: Client, namespace: Namespace
) -> None:
    """A late writer: it may write where it likes in the segment, but not into the projection."""
    keys = put(namespace, 8)
    with namespace.get_view(keys) as view:
        block = view.blocks[3]
        assert block is not None
        memory = np.frombuffer(block[0].base.base, dtype=np.uint8)  # the whole segment, writable
        at = block[0].ctypes.data - memory.ctypes.data
        memory[at + 77] ^= 1
    got = namespace.get(keys)
    assert [b is not None for b in got.blocks] == [True] * 3 + [False] + [True] * 4
    assert client.optimistic_reads().mismatched == 1
    assert got.corrupt == 1


def test_a_child_of_a_fork_reads_by_its_own_session(client: Client, namespace: Namespace) -> None:
    keys = put(namespace, 4)
    assert namespace.get(keys).hits == 4
    child = os.fork()
    if child == 0:
        try:
            got = namespace.get(keys)
            right = all(is_right(k, b[0]) for k, b in zip(keys, got.blocks, strict=True) if b)
            fine = got.hits == 4 and right and client.optimistic_reads().hits == 4
            os._exit(0 if fine else 1)
        except BaseException:  # noqa: BLE001 - the child must not return into pytest
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert namespace.get(keys).hits == 4
    assert client.optimistic_reads().hits == 8


def test_a_projection_of_before_a_restart_is_not_asked_any_more(tmp_path: Path) -> None:
    with Served(tmp_path, dram="64MiB", disk="0B") as served, Client(served.address) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        keys = put(namespace, 8)
        assert namespace.get(keys).hits == 8
        epoch = served.kill_daemon().epoch
        served.answered(after_epoch=epoch)
        served.recovered()
        with Client(served.address) as other:
            other.open_namespace(namespace.spec).remove(keys[:4])
        got = namespace.get(keys)
        assert [block is not None for block in got.blocks] == [False] * 4 + [True] * 4
        assert client.optimistic_reads().hits == 8  # what was recovered was acquired, and proved
        assert namespace.get(keys[4:]).hits == 4
        assert client.optimistic_reads().hits == 12


READER = """
import random, sys, time
import numpy as np
from kvstored import native
from kvstored.client import Client, Keys
from tests.crash.blocks import content_of, spec_of
address, seed, seconds, size, window = sys.argv[1], *map(int, sys.argv[2:])
keys = [number.to_bytes(32, "big") for number in range(window)]
right = {key: content_of(key, size) for key in keys}
rng, wrong, reads = random.Random(seed), 0, 0
with Client(address) as client:
    namespace = client.open_namespace(spec_of(size))
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        asked = rng.sample(keys, rng.choice([1, 2, 6, 6]))
        opaque, reads = Keys.opaque(asked, unchained=True), reads + len(asked)
        if rng.random() < 0.5:
            rows = np.empty((len(asked), size), dtype=np.uint8)
            got = namespace.get_into(opaque, [[row[: size // 3], row[size // 3 :]] for row in rows])
            found = [row if filled else None for row, (filled,) in zip(rows, got.filled)]
        else:
            found = [block and block[0] for block in namespace.get(opaque).blocks]
        wrong += sum(row is not None and not np.array_equal(row, right[key]) for key, row in zip(asked, found))
    seen = client.optimistic_reads()
    print(reads, wrong, seen.hits, seen.changed, seen.mismatched, flush=True)
"""


@pytest.mark.parametrize("switch", ["", "off"])
def test_readers_of_places_that_are_written_again_and_again_never_see_a_wrong_byte(
    tmp_path: Path, switch: str
) -> None:
    """More blocks than there is room for are put in turn, while processes read any of them."""
    size, window, seconds = 1 << 20, 24, 7
    with Served(tmp_path, dram="16MiB", disk="0B") as served, Client(served.address) as client:
        namespace = client.open_namespace(spec_of(size))
        arguments = [(served.address, *map(str, (i, seconds, size, window))) for i in range(2)]
        readers = [
            subprocess.Popen(
                [sys.executable, "-c", READER, *each],
                env={**environment(), "KVSTORED_NATIVE": switch},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for each in arguments
        ]
        keys = [number.to_bytes(32, "big") for number in range(window)]
        contents = {key: content_of(key, size) for key in keys}
        for begin in itertools.cycle(range(0, window, 2)):
            if all(reader.poll() is not None for reader in readers):
                break
            pair = keys[begin : begin + 2]
            namespace.put(Keys.opaque(pair, unchained=True), [contents[key] for key in pair])
            if begin % 8 == 0:
                namespace.remove(Keys.opaque(pair, unchained=True))
        answers = [reader.communicate(timeout=40)[0].split() for reader in readers]
        reads, wrong, hits, changed, mismatched = np.array(answers, dtype=int).sum(axis=0).tolist()
        assert wrong == 0
        assert min(reads, hits) > 100
        assert changed + mismatched > 0
