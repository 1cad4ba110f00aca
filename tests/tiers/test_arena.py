"""The arena: the tier's promises, what clients rely on, and what is left when the daemon is gone."""

import fcntl
import mmap
import os
import socket
import timeit
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvstored.core.types import UNIT_BYTES, Extent
from kvstored.errors import Corrupt, InvalidArgument, NoSpace, NotFound
from kvstored.paging import HugePages
from kvstored.tiers import views as memory
from kvstored.tiers.arena import Arena
from kvstored.tiers.base import Counters, Link, ref_of
from kvstored.tiers.record import Record, State
from tests.tiers.conformance import (
    SEGMENT_UNITS,
    Conformance,
    content,
    piece,
    read_one,
    run_of,
    same_bytes,
    scan_all,
    scattered,
    write_one,
)

PLENTY = 1 << 40


def make(units: int = 1024, *, available: int = PLENTY, incarnation: int = 1) -> Arena:
    return Arena(units * UNIT_BYTES, incarnation=incarnation, available_bytes=lambda: available)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = make()
    arena.grow()
    yield arena
    arena.close()


def filling(arena: Arena, number: int, place: tuple[Extent, ...], length: int) -> Record:
    """A granted piece whose writer has put its bytes there but has not committed."""
    record, source = piece(number, place, length)
    record = replace(record, state=State.FILLING, owner_pid=99)
    arena.mark_filling([record])
    memory.copy(source, arena.views(place, length))
    return record


class TestArenaConforms(Conformance):
    @pytest.fixture
    def tier(self) -> Iterator[Arena]:
        arena = make(SEGMENT_UNITS)
        assert arena.grow() == (0, SEGMENT_UNITS)
        yield arena
        arena.close()


class TestStates:
    def test_what_is_being_filled_cannot_be_read(self, arena: Arena) -> None:
        record = filling(arena, 1, run_of(3, 9000), 9000)
        with pytest.raises(NotFound):
            read_one(arena, record)
        arena.mark_ready([(record.place, record.checksum)])
        assert read_one(arena, record)[0] == replace(record, state=State.READY)

    def test_freed_places_hold_no_record(self, arena: Arena) -> None:
        record = filling(arena, 1, scattered(4, 5, 1), 5 * UNIT_BYTES)
        arena.mark_ready([(record.place, record.checksum)])
        arena.mark_free([record.place])
        assert arena.record_at(record.place).state is State.FREE
        assert scan_all(arena, 100) == []

    def test_key_and_record_are_found_by_place(self, arena: Arena) -> None:
        record = filling(arena, 5, scattered(4, 2, 3), 20_000)
        assert arena.key_at(record.place) == record.key
        assert arena.record_at(record.place) == record
        with pytest.raises(Corrupt):
            arena.record_at(record.place[:1])

    def test_leases_and_counters_are_kept(self, arena: Arena) -> None:
        stored = write_one(arena, *piece(1, run_of(3, 9000), 9000))
        arena.set_leased([stored.place[0][:2]], leased=True)
        arena.flush_counters([Counters(ref_of(stored), stored.place, 9, 77.5, 1)])
        expected = replace(stored, leased=True, hits=9, last_s=77.5, heat=1)
        assert scan_all(arena, 100) == [expected]
        arena.set_leased([stored.place[0][:2]], leased=False)
        assert not arena.record_at(stored.place).leased

    def test_a_relinked_piece_keeps_everything_but_its_place_in_the_tree(
        self, arena: Arena
    ) -> None:
        stored = write_one(arena, *piece(1, scattered(4, 3, 1), 9000))
        arena.relink([Link(ref_of(stored), stored.place, b"p" * 16, 8)])
        arena.relink([Link(ref_of(stored), run_of(0, 9000), b"q" * 16, 9)])
        assert scan_all(arena, 100) == [replace(stored, parent=b"p" * 16, depth=8)]

    def test_verify_says_which_bytes_are_as_they_were(self, arena: Arena) -> None:
        stored = [write_one(arena, *piece(i, run_of(i * 4, 9000), 9000)) for i in (1, 2)]
        arena.views(stored[1].place, 9000)[0][8999] ^= 1
        items = [(record.place, record.length, record.checksum) for record in stored]
        assert arena.verify(items) == [True, False]
        with pytest.raises(Corrupt):
            read_one(arena, stored[1])

    def test_views_are_cut_at_extents_and_length(self, arena: Arena) -> None:
        place = (Extent(0, 7, 1), Extent(0, 3, 2), Extent(0, 10, 1))
        assert [len(view) for view in arena.views(place, 5000)] == [4096, 904]
        assert [len(view) for view in arena.views(place, 4 * 4096)] == [4096, 8192, 4096]

    def test_marking_takes_less_than_10_us_a_piece(self, arena: Arena) -> None:
        records = [
            replace(piece(i, (Extent(0, i, 1),), 100)[0], state=State.FILLING)
            for i in range(1, 1001)
        ]
        places = [record.place for record in records]
        ready = [(record.place, record.checksum) for record in records]

        def life() -> None:
            arena.mark_filling(records)
            arena.mark_ready(ready)
            arena.mark_free(places)

        assert min(timeit.repeat(life, number=1, repeat=7)) < 10e-3


class TestSegments:
    def test_a_segment_cannot_be_resized(self, arena: Arena) -> None:
        for fd in arena.fds().values():
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 4096)
            with pytest.raises(PermissionError):
                os.ftruncate(fd, 1 << 30)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    def test_a_client_sees_the_bytes_through_the_descriptor(self, arena: Arena) -> None:
        record, source = piece(1, run_of(3, 9000), 9000)
        write_one(arena, record, source)
        seen = mmap.mmap(arena.segment_fd(0), 1024 * UNIT_BYTES)
        assert seen[3 * UNIT_BYTES :][:9000] == source[0].tobytes()
        with pytest.raises(NotFound):
            arena.segment_fd(1)

    def test_memory_is_backed_before_it_is_granted(self, arena: Arena) -> None:
        assert os.fstat(arena.segment_fd(0)).st_blocks * 512 >= 1024 * UNIT_BYTES

    def test_grow_refuses_when_memory_would_run_out(self) -> None:
        reserve = 10 << 20
        cost = 1024 * (UNIT_BYTES + 256) + UNIT_BYTES
        short = make(available=cost + (256 << 20) - 1)
        with pytest.raises(NoSpace, match=r"needed_bytes=.*available_bytes="):
            short.grow()
        assert short.segments() == []
        exact = Arena(
            1024 * UNIT_BYTES,
            incarnation=1,
            available_bytes=lambda: cost + reserve,
            reserve_bytes=reserve,
        )
        assert exact.grow() == (0, 1024)
        assert exact.grow() == (1, 1024)
        exact.close()

    def test_a_segment_has_whole_units(self) -> None:
        with pytest.raises(InvalidArgument):
            Arena(4097, incarnation=1, available_bytes=lambda: PLENTY)

    def test_scanning_allocates_nothing(self, arena: Arena) -> None:
        write_one(arena, *piece(1, run_of(900, 9000), 9000))
        tables = [fd for name, fd in arena.fds().items() if "-rec-" in name]
        before = [os.fstat(fd).st_blocks for fd in tables]
        assert len(scan_all(arena, 64)) == 1
        assert [os.fstat(fd).st_blocks for fd in tables] == before

    def test_views_outlive_close(self) -> None:
        arena = make()
        arena.grow()
        view = arena.views((Extent(0, 0, 1),), 4096)[0]
        view[:] = 7
        arena.close()
        assert int(view.sum()) == 7 * 4096


class TestAdoption:
    def test_records_and_bytes_survive_the_process_that_made_them(self) -> None:
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            try:
                _live_and_die(theirs)
            finally:
                os._exit(1)
        theirs.close()
        names, fds, _, _ = socket.recv_fds(ours, 4096, 8)
        assert os.waitpid(child, 0)[1] == 9
        ours.close()
        arena = make(incarnation=2)
        adopted = arena.adopt(dict(zip(names.decode().split(), fds, strict=True)))
        assert adopted.segments == ((0, 1024), (1, 1024))
        assert adopted.refused == ()
        found = {record.generation: record for record in scan_all(arena, 100)}
        assert sorted(found) == [1, 2, 3]
        assert found[1].state is State.READY
        assert found[2].place == (Extent(0, 100, 2), Extent(1, 5, 2))
        assert same_bytes(read_one(arena, found[2])[1], content(2, 12_345))
        assert (found[3].state, found[3].owner_pid) == (State.FILLING, 99)
        assert arena.grow() == (2, 1024)
        assert sorted(arena.fds())[::3] == [
            "kvstored-rec-0-0000000000000001",
            "kvstored-seg-0-0000000000000001",
        ]
        arena.close()

    def test_damaged_records_are_dropped_and_the_rest_kept(self, arena: Arena) -> None:
        kept = write_one(arena, *piece(1, run_of(0, 9000), 9000))
        write_one(arena, *piece(2, run_of(10, 9000), 9000))
        write_one(arena, *piece(3, scattered(20, 3, 1), 9000))
        table = mmap.mmap(arena.fds()["kvstored-rec-0-0000000000000001"], 4096 + 1024 * 256)
        table[4096 + 10 * 256 + 60] ^= 1  # digest of piece 2
        table[4096 + 22 * 256 + 212] ^= 1  # units of piece 3's middle extent
        adopted = _readopted(arena)
        batch = adopted.scan(0, 1024)
        assert (batch.rejected, batch.done) == (2, True)
        assert scan_all(adopted, 100) == [kept]
        assert adopted.scan(0, 1024).rejected == 0
        adopted.close()

    @pytest.mark.parametrize("at", [0, 4, 12, 20])
    def test_a_segment_of_another_version_is_refused_and_closed(
        self, arena: Arena, at: int
    ) -> None:
        fds = {name: os.dup(fd) for name, fd in arena.fds().items()}
        mmap.mmap(fds["kvstored-rec-0-0000000000000001"], 4096)[at] ^= 4
        adopting = make()
        adopted = adopting.adopt(fds)
        assert adopted.segments == ()
        assert {name for name, _ in adopted.refused} == set(fds)
        for fd in fds.values():
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    def test_unsealed_or_lone_or_foreign_descriptors_are_refused(self, arena: Arena) -> None:
        fds = {name: os.dup(fd) for name, fd in arena.fds().items()}
        table, bytes_ = sorted(fds)
        loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
        os.ftruncate(loose, 1024 * UNIT_BYTES)
        adopted = make().adopt({table: os.dup(fds[table]), bytes_: loose})
        assert "can change size" in adopted.refused[0][1]
        adopted = make().adopt({table: fds[table]})
        assert "only one" in adopted.refused[0][1]
        reader, writer = os.pipe()
        adopted = make().adopt({table: reader, bytes_: writer})
        assert len(adopted.refused) == 2
        assert make().adopt({"http.socket": 0}).refused == ()
        os.close(fds[bytes_])

    def test_the_same_segment_twice_is_refused_once(self, arena: Arena) -> None:
        adopting = make()
        assert len(adopting.adopt({n: os.dup(fd) for n, fd in arena.fds().items()}).segments) == 1
        again = adopting.adopt({n: os.dup(fd) for n, fd in arena.fds().items()})
        assert (again.segments, len(again.refused)) == ((), 2)
        adopting.close()


def _readopted(arena: Arena) -> Arena:
    adopting = make(incarnation=2)
    adopting.adopt({name: os.dup(fd) for name, fd in arena.fds().items()})
    return adopting


def _live_and_die(channel: socket.socket) -> None:
    """The first daemon: stores two pieces, leaves one half written, hands its descriptors out and is killed."""
    arena = make()
    arena.grow()
    arena.grow()
    write_one(arena, *piece(1, run_of(0, 9000), 9000))
    write_one(arena, *piece(2, (Extent(0, 100, 2), Extent(1, 5, 2)), 12_345))
    filling(arena, 3, run_of(50, 4096), 4096)
    fds = arena.fds()
    socket.send_fds(channel, [" ".join(fds).encode()], list(fds.values()))
    os.kill(os.getpid(), 9)


def test_numpy_rows_are_the_table(arena: Arena) -> None:
    stored = write_one(arena, *piece(1, run_of(5, 9000), 9000))
    batch = arena.scan(0, 1024)
    assert batch.records["length"].tolist() == [stored.length]
    assert batch.extents.tolist() == [[0, 5, 3]]
    assert batch.extents.dtype == np.uint32


@pytest.mark.parametrize("pages", HugePages)
def test_a_segment_of_huge_pages_is_like_any_other_or_is_refused_with_what_to_reserve(
    pages: HugePages,
) -> None:
    """Which of both for hugetlb depends on the machine: pages have to be reserved there."""
    arena = Arena(2 << 20, incarnation=1, available_bytes=lambda: PLENTY, pages=pages)
    refusal = ""
    try:
        arena.grow()
    except NoSpace as error:
        refusal = str(error)
    if refusal:
        assert (pages, "vm.nr_hugepages" in refusal) == (HugePages.HUGETLB, True)
        return
    record, source = piece(1, run_of(0, 3 * UNIT_BYTES), 3 * UNIT_BYTES)
    assert isinstance(write_one(arena, record, source), Record)
    adopted = make(512)
    fds = {name: os.dup(fd) for name, fd in arena.fds().items()}
    assert adopted.adopt(fds).segments == ((0, 512),)
    assert same_bytes(adopted.views(run_of(0, 3 * UNIT_BYTES), 3 * UNIT_BYTES), source)
    arena.close()
    adopted.close()


def test_a_segment_of_reserved_pages_is_whole_pages() -> None:
    with pytest.raises(InvalidArgument, match="2097152"):
        Arena(3 << 20, incarnation=1, available_bytes=lambda: PLENTY, pages=HugePages.HUGETLB)
