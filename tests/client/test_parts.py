"""Gets in parts: in their order, with the others under way meanwhile, and right."""

import errno
import socket
from collections.abc import Iterator
from typing import Never

import numpy as np
import pytest

from kvstored.client import Client, Keys, Namespace, ReadStatus
from kvstored.client.channel import LocalChannel, LocalLink
from kvstored.client.links import GetCall
from kvstored.client.optimistic import Optimistic
from kvstored.client.parts import PART_BYTES, cut, got_in_turns, merged, within
from kvstored.client.results import GetResult
from kvstored.clock import ManualClock
from kvstored.errors import Unavailable
from kvstored.pb import kvstored_pb2 as pb
from tests.crash.blocks import content_of, is_right, spec_of
from tests.crash.served import Served

MIB = 1 << 20
COUNT = 40


def test_a_small_read_is_one_part_and_a_large_one_is_cut_at_its_bytes() -> None:
    assert cut(31, MIB) == [range(31)]
    assert cut(40, MIB) == [range(16), range(16, 32), range(32, 40)]
    assert cut(3, 64 * MIB) == [range(1), range(1, 2), range(2, 3)]
    assert cut(4096, 0) == [range(4096)]
    assert all(len(part) * 24_576 <= PART_BYTES for part in cut(4096, 24_576))


class Line:
    """Writes down what it is asked for and answers with the call's number."""

    def __init__(self, name: str, log: list[str], fails_at: int = -1) -> None:
        self.name, self.log, self.fails_at = name, log, fails_at

    def begin_get(self, call: GetCall, timeout_s: float) -> GetCall:
        self.log.append(f"{self.name} asks {call.keys}")
        return call

    def end_get(self, asked: GetCall, timeout_s: float) -> GetResult:
        self.log.append(f"{self.name} takes {asked.keys}")
        if asked.keys == self.fails_at:
            raise Unavailable("gone")
        return result(asked.keys)


def result(number: int, *, verified: bool = True, lossy: bytes = b"") -> GetResult:
    data = np.full(1, number, dtype=np.uint8)
    return GetResult(
        blocks=((data,),),
        status=(ReadStatus.HIT,),
        tiers=bytes([number]),
        generations=(number,),
        miss_reason="",
        corrupt=0,
        verified=verified,
        lossy=lossy,
    )


def calls(count: int) -> list[GetCall]:
    return [GetCall(pb.AcquireRequest(), number, 1) for number in range(count)]


def test_each_link_has_a_call_under_way_and_answers_keep_their_order() -> None:
    log: list[str] = []
    got = got_in_turns([Line("a", log), Line("b", log)], calls(3), 1.0)
    assert [each.generations for each in got] == [(0,), (1,), (2,)]
    assert log == [
        *("a asks 0", "b asks 1", "a takes 0"),
        *("a asks 2", "b takes 1", "a takes 2"),
    ]


def test_one_link_goes_on_call_by_call_and_a_failure_ends_it() -> None:
    log: list[str] = []
    with pytest.raises(Unavailable):
        got_in_turns([Line("a", log, fails_at=1)], calls(3), 1.0)
    assert log == ["a asks 0", "a takes 0", "a asks 1", "a takes 1"]


def test_one_answer_of_many_tells_what_any_of_them_tells() -> None:
    one = merged([([2], result(7, lossy=b"\1")), ([0], result(5, verified=False))])
    assert one.status == (ReadStatus.HIT, ReadStatus.MISS, ReadStatus.HIT)
    assert one.generations == (5, 0, 7)
    assert one.lossy == (False, False, True)
    assert not one.verified
    assert one.blocks[1] is None


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Its memory is empty: what was put lies on its disk."""
    folder = tmp_path_factory.mktemp("served")
    with Served(folder, dram="128MiB", disk="256MiB") as served:
        with Client(served.address) as client:
            keys, blocks = stored()
            assert client.open_namespace(spec_of(MIB)).put(keys, blocks).stored == COUNT
        assert served.terminate() == 0
        served.start()
        yield served


def stored() -> tuple[Keys, list[np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    keys = [n.to_bytes(32, "big") for n in range(COUNT)]
    return Keys.opaque(keys), [content_of(key, MIB) for key in keys]


@pytest.fixture
def namespace(restarted: Served) -> Iterator[Namespace]:
    with Client(restarted.address) as client:
        yield client.open_namespace(spec_of(MIB))


def test_a_large_cold_read_is_right_and_counts_as_read_from_disk(
    restarted: Served, namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[LocalLink | None] = []
    borrow = LocalChannel.borrow_another

    def borrowed(channel: LocalChannel, timeout_s: float) -> LocalLink | None:
        lent.append(borrow(channel, timeout_s))
        return lent[-1]

    monkeypatch.setattr(LocalChannel, "borrow_another", borrowed)
    keys, _ = stored()
    got = namespace.get(keys)
    assert got.hits == COUNT
    assert all(is_right(k, b[0]) for k, b in zip(keys, got.blocks, strict=True) if b is not None)
    assert restarted.stat().counters["read_keys_hit:nvme"] == COUNT
    assert namespace.get(keys).hits == COUNT
    assert len(lent) == 2, "three parts are under way"
    assert None not in lent


def test_the_load_deadline_is_that_of_the_whole_read() -> None:
    """Each part had all of it anew: four parts with 0.3 s took 0.6 s, and more parts more."""
    clock = ManualClock()
    asked = [GetCall(pb.AcquireRequest(deadline_ms=ms), 1, 1) for ms in (300, 300, 300, 0)]
    left = []
    for call in within(asked, clock):
        left.append(call.request.deadline_ms)
        clock.advance(0.2)
    assert left == [300, 100, 1, 0]


def test_a_client_out_of_descriptors_reads_over_the_one_connection_that_it_has(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The get failed, with an OSError of its own, though one connection would do."""

    def refused(*_: object) -> Never:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Optimistic, "read", lambda *_: None)
    monkeypatch.setattr(socket, "socket", refused)
    assert namespace.get(stored()[0]).hits == COUNT
    monkeypatch.undo()  # the fixture's own connections
