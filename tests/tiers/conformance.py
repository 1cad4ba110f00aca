"""What every tier must do, as one class of tests; a tier's test module subclasses it and says how one is made."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from kvstored.core.columnar import Places
from kvstored.core.types import UNIT_BYTES, Extent, Place
from kvstored.errors import Corrupt, NotFound
from kvstored.tiers import record as layout
from kvstored.tiers import views as memory
from kvstored.tiers.base import PieceRef, PieceRun, ScanBatch, Tier, Views, ref_of
from kvstored.tiers.record import Record, Records, State
from kvstored.tiers.record_runs import packed
from kvstored.tiers.slabs import aligned

SEGMENT_UNITS = (128 << 20) // UNIT_BYTES
"""Units that a tier under test has, in segment 0."""


def content(seed: int, length: int) -> Views:
    """Bytes of which half compress well, made from a seed."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, length, dtype=np.uint8)
    raw[: length // 2] &= 0x0F
    return [raw]


def piece(number: int, place: Place, length: int) -> tuple[Record, Views]:
    """A record with its bytes, both made from a number."""
    source = content(number, length)
    checksum = memory.hash_of(source)
    record = Record(
        digest=bytes([number % 251]) * 32,
        key=number.to_bytes(8, "big") * 4,
        fingerprint=number.to_bytes(16, "little"),
        group=number % 3,
        shard=number % 2,
        place=place,
        length=length,
        checksum=checksum,
        stored_length=length,
        stored_checksum=checksum,
        generation=number,
        parent=(number - 1).to_bytes(16, "little"),
        valid_tokens=256,
        depth=number,
        hits=3,
        last_s=1e9 + number,
        heat=2,
    )
    return record, source


def run_of(start: int, length: int) -> Place:
    return (Extent(0, start, -(-length // UNIT_BYTES)),)


def scattered(start: int, extents: int, units: int) -> Place:
    """Extents with a hole after each, highest first."""
    return tuple(Extent(0, start + i * units * 2, units) for i in reversed(range(extents)))


def empty(length: int) -> Views:
    return [np.zeros(length, dtype=np.uint8)]


def read_one(tier: Tier, record: Record) -> tuple[Record, Views]:
    """The piece as the tier has it now; raises what the tier answered."""
    target = empty(record.length)
    found = tier.read([(ref_of(record), record.place, target)])[0]
    if not isinstance(found, Record):
        raise found
    return found, target


def write_one(tier: Tier, record: Record, source: Views) -> Record:
    stored = tier.write([(record, source)])[0]
    if not isinstance(stored, Record):
        raise stored
    return stored


def scan_all(tier: Tier, limit: int) -> list[Record]:
    """Every record by scanning, rebuilt from the columns."""
    found: list[Record] = []
    cursor, done = 0, False
    while not done:
        batch = tier.scan(cursor, limit)
        assert len(batch.records) <= limit
        found.extend(records_of(batch))
        cursor, done = batch.cursor, batch.done
    return found


def records_of(batch: ScanBatch) -> Iterator[Record]:
    assert batch.extents.shape == (int(batch.extent_counts.sum()), 3)
    ends = np.cumsum(batch.extent_counts, dtype=np.int64)
    for row, end, count in zip(batch.records, ends, batch.extent_counts, strict=True):
        place = tuple(Extent(*map(int, e)) for e in batch.extents[end - count : end])
        yield layout.unpack(row.tobytes(), place)


def same_bytes(a: Views, b: Views) -> bool:
    return np.array_equal(np.concatenate(list(a)), np.concatenate(list(b)))


def plain_run(numbers: Sequence[int], length: int, first: int = 0) -> tuple[PieceRun, Records]:
    """Pieces of group 0 and shard 0, back to back from unit `first` on, with their bytes in aligned slots, and their records."""
    units = -(-length // UNIT_BYTES)
    count = len(numbers)
    starts = first + np.arange(count, dtype=np.int64) * units
    places = Places(np.zeros(count, np.int64), starts, np.full(count, units, np.int64))
    records, slots = np.zeros(count, dtype=layout.RECORD), []
    for i, number in enumerate(numbers):
        record, source = piece(number, places.place(i), length)
        records[i] = packed(replace(record, group=0, shard=0))
        slots.append(aligned(length))
        slots[-1][:length] = source[0]
    fingerprints = np.ascontiguousarray(records["fingerprint"])
    return PieceRun(fingerprints, places, length, slots), records


def emptied(run: PieceRun) -> PieceRun:
    return replace(run, slots=[aligned(run.length) for _ in run.slots])


class Conformance:
    """Subclasses give a fixture `tier` with segment 0 of SEGMENT_UNITS."""

    @pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 1 << 20, 96 << 20])
    def test_what_is_written_is_read(self, tier: Tier, length: int) -> None:
        record, source = piece(1, run_of(8, length), length)
        stored = write_one(tier, record, source)
        assert (stored.length, stored.checksum) == (length, record.checksum)
        assert stored.state is State.READY
        found, target = read_one(tier, stored)
        assert found == stored
        assert same_bytes(source, target)

    @pytest.mark.parametrize(("extents", "units"), [(2, 1), (3, 7), (64, 1), (64, 4)])
    def test_a_piece_may_lie_in_many_extents(self, tier: Tier, extents: int, units: int) -> None:
        length = extents * units * UNIT_BYTES - 100
        record, source = piece(2, scattered(4, extents, units), length)
        stored = write_one(tier, record, source)
        assert same_bytes(source, read_one(tier, stored)[1])

    def test_source_and_target_may_be_cut_anywhere(self, tier: Tier) -> None:
        record, source = piece(3, scattered(4, 2, 5), 10 * UNIT_BYTES - 7)
        cut = [source[0][:5], source[0][5:8192], source[0][8192:8193], source[0][8193:]]
        stored = write_one(tier, record, cut)
        target = empty(record.length)[0]
        views = [target[:4096], target[4096:20_001], target[20_001:]]
        assert isinstance(tier.read([(ref_of(stored), stored.place, views)])[0], Record)
        assert same_bytes(source, [target])

    def test_the_place_is_cut_down_to_what_is_used(self, tier: Tier) -> None:
        place = (Extent(0, 4, 2), Extent(0, 50, 3), Extent(0, 9, 9))
        record, source = piece(4, place, 3 * UNIT_BYTES)
        stored = write_one(tier, record, source)
        assert stored.place == layout.trimmed(place, stored.stored_length)
        assert same_bytes(source, read_one(tier, stored)[1])

    def test_items_of_one_call_fare_independently(self, tier: Tier) -> None:
        items = [piece(i, run_of(i * 16, 9000), 9000) for i in range(1, 9)]
        bad = replace(items[3][0], checksum=items[3][0].checksum ^ 1)
        outcomes = tier.write([*items[:3], (bad, items[3][1]), *items[4:]])
        assert [type(outcome) for outcome in outcomes] == [Record] * 3 + [Corrupt] + [Record] * 4
        stored = [outcome for outcome in outcomes if isinstance(outcome, Record)]
        reads = [(ref_of(record), record.place, empty(9000)) for record in stored]
        absent = (PieceRef(b"x" * 16, 0, 0), stored[0].place, empty(9000))
        read = tier.read([*reads, absent])
        assert read[:-1] == stored
        assert isinstance(read[-1], NotFound)
        sources = [source for i, (_, source) in enumerate(items) if i != 3]
        assert all(same_bytes(a, b[2]) for a, b in zip(sources, reads, strict=True))

    def test_a_source_that_does_not_match_its_checksum_is_not_stored(self, tier: Tier) -> None:
        record, source = piece(5, run_of(0, 5000), 5000)
        source[0][4999] ^= 1
        assert isinstance(tier.write([(record, source)])[0], Corrupt)
        assert scan_all(tier, 100) == []

    def test_nothing_is_found_at_another_place(self, tier: Tier) -> None:
        record, source = piece(6, run_of(0, 5000), 5000)
        stored = write_one(tier, record, source)
        with pytest.raises(NotFound):
            read_one(tier, replace(stored, place=(Extent(0, 1, 2),)))
        with pytest.raises(NotFound):
            read_one(tier, replace(stored, place=(Extent(77, 0, 2),)))
        assert tier.discard([(ref_of(stored), (Extent(0, 1, 2),))]) == [None]
        read_one(tier, stored)

    def test_discard_gives_the_record_and_forgets_it(self, tier: Tier) -> None:
        stored = [write_one(tier, *piece(i, run_of(i * 4, 5000), 5000)) for i in range(1, 4)]
        item = (ref_of(stored[1]), stored[1].place)
        assert tier.discard([item, item, (ref_of(stored[2]), stored[2].place)])[::2] == [
            stored[1],
            stored[2],
        ]
        assert tier.discard([item]) == [None]
        with pytest.raises(NotFound):
            read_one(tier, stored[1])
        assert scan_all(tier, 100) == [stored[0]]

    def test_freed_space_is_written_again(self, tier: Tier) -> None:
        first = write_one(tier, *piece(1, run_of(0, 9000), 9000))
        tier.discard([(ref_of(first), first.place)])
        record, source = piece(2, run_of(0, 9000), 9000)
        second = write_one(tier, record, source)
        with pytest.raises(NotFound):
            read_one(tier, first)
        assert same_bytes(source, read_one(tier, second)[1])

    @pytest.mark.parametrize("limit", [1, 7, 8192])
    def test_scan_finds_every_piece_once(self, tier: Tier, limit: int) -> None:
        stored = {}
        for i in range(1, 40):
            place = scattered(i * 10, 3, 1) if i % 4 == 0 else run_of(i * 10, 5000)
            record = write_one(tier, *piece(i, place, 5000))
            stored[record.fingerprint] = record
        found = scan_all(tier, limit)
        assert len(found) == len(stored)
        assert {record.fingerprint: record for record in found} == stored

    # ---- runs of plain pieces

    @pytest.mark.parametrize("length", [1, 4095, 4096, 9000, 1 << 17])
    def test_a_run_is_read_as_it_was_written(self, tier: Tier, length: int) -> None:
        run, records = plain_run(range(1, 41), length)
        stored = tier.write_run(run, records)
        assert not stored.faults
        target = emptied(replace(run, places=run.places._replace(units=stored.units)))
        came = tier.read_run(target)
        assert not came.faults
        assert (came.records["checksum"] == records["checksum"]).all()
        assert all(same_bytes(target.views(i), run.views(i)) for i in range(len(run))), (
            "a run gave other bytes"
        )

    def test_runs_and_single_calls_find_each_other_s_pieces(self, tier: Tier) -> None:
        run, records = plain_run(range(1, 9), 9000)
        stored = tier.write_run(run, records)
        for i in range(len(run)):
            place = (run.places.place(i)[0]._replace(units=int(stored.units[i])),)
            record = layout.unpack(stored.records[i].tobytes(), place)
            found, target = read_one(tier, record)
            assert found == record
            assert same_bytes(target, run.views(i))
        other, other_records = plain_run(range(20, 28), 9000, first=100)
        singles = [
            write_one(tier, layout.unpack(row.tobytes(), other.places.place(i)), other.views(i))
            for i, row in enumerate(other_records)
        ]
        units = np.asarray([single.place[0].units for single in singles], dtype=np.int64)
        came = tier.read_run(emptied(replace(other, places=other.places._replace(units=units))))
        assert not came.faults

    def test_pieces_of_a_run_fare_independently(self, tier: Tier) -> None:
        run, records = plain_run(range(1, 9), 9000)
        records["checksum"][3] ^= 1
        stored = tier.write_run(run, records)
        assert {i: type(fault) for i, fault in stored.faults.items()} == {3: Corrupt}
        units = stored.units.copy()
        start = run.places.start.copy()
        start[5] += 1  # the books think it lies elsewhere
        target = emptied(replace(run, places=run.places._replace(start=start, units=units)))
        came = tier.read_run(target)
        assert {i: type(fault) for i, fault in came.faults.items()} == {3: NotFound, 5: NotFound}
        good = [i for i in range(8) if i not in came.faults]
        assert all(same_bytes(target.views(i), run.views(i)) for i in good)

    def test_threads_of_a_lane_do_not_disturb_each_other(self, tier: Tier) -> None:
        """Four threads write, read, discard and scan, each on pieces of its own."""

        def live(thread: int) -> int:
            whole = 0
            for turn in range(12):
                number = thread * 100 + turn + 1
                items = [
                    piece(number * 10 + i, run_of(thread * 400 + i * 4, 9000), 9000)
                    for i in range(5)
                ]
                stored = [o for o in tier.write(items) if isinstance(o, Record)]
                targets = [empty(9000) for _ in stored]
                reads = [(ref_of(r), r.place, t) for r, t in zip(stored, targets, strict=True)]
                assert tier.read(reads) == stored
                whole += sum(map(same_bytes, targets, [source for _, source in items]))
                tier.scan(0, 100)
                assert tier.discard([(ref_of(r), r.place) for r in stored]) == stored
            return whole

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(live, range(4))) == [60] * 4
        assert scan_all(tier, 100) == []

    def test_a_target_of_another_length_is_refused(self, tier: Tier) -> None:
        stored = write_one(tier, *piece(1, run_of(0, 9000), 9000))
        outcomes = tier.read([(ref_of(stored), stored.place, empty(n)) for n in (8999, 9001)])
        assert [type(outcome) for outcome in outcomes] == [Corrupt, Corrupt]
