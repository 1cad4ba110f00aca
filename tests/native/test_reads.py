"""Reads without a message in C beside those in Python, on projections that are right, torn, hostile and changing."""

import os
import random
import struct
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import xxhash

from kvstored import native
from kvstored.client.projected import Index
from kvstored.core.keys import key_batch
from kvstored.core.types import UNIT_BYTES
from kvstored.tiers import entries as layout
from kvstored.tiers.entries import ENTRY_BYTES, WAYS, Superblock

Bytes = np.ndarray
DIGEST, SEED = bytes(range(32)), 77
BUCKETS = 16
UNITS = 64


@dataclass
class World:
    """A projection and the one segment that it tells of, both made by hand; `contents`: what each key has."""

    facts: Superblock = field(default_factory=lambda: Superblock(5, BUCKETS))
    segment: Bytes = field(default_factory=lambda: np.zeros(UNITS * UNIT_BYTES, dtype=np.uint8))
    contents: dict[bytes, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.words = np.zeros(self.facts.size_bytes // 8, dtype=np.uint64)
        self.memory = self.words.view(np.uint8)
        packed = self.facts.pack()
        self.memory[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)

    def slot_of(self, key: bytes) -> tuple[int, int]:
        low, high = key_batch(key, len(key), SEED).fingerprints[0].tolist()
        tags = self.words[self.facts.tags_at // 8 :]
        first = (high & BUCKETS - 1) * WAYS
        ways = tags[first : first + WAYS].tolist()
        way = ways.index(low) if low in ways else ways.index(0) if 0 in ways else 0
        return first + way, low

    def show(self, key: bytes, start: int, content: bytes, **told: int) -> None:
        """`told`: what the entry says otherwise."""
        slot, tag = self.slot_of(key)
        size = len(content)
        self.segment[start * UNIT_BYTES : start * UNIT_BYTES + size] = np.frombuffer(
            content, dtype=np.uint8
        )
        checksum = xxhash.xxh3_64_intdigest(content)
        place = told.get("segment", 0) << 32 | told.get("unit", start)
        sizes = told.get("length", size) << 8 | told.get("key_bytes", len(key))
        covered = struct.pack(
            "<2Q16s64s2Q", checksum, slot + 1, DIGEST[:16], key.ljust(64, b"\0"), place, sizes
        )
        own = told.get("own", xxhash.xxh3_64_intdigest(covered))
        entry = struct.pack("<Q", told.get("sequence", 2)) + covered + struct.pack("<Q", own)
        self.words[self.facts.tags_at // 8 + slot] = tag
        at = self.facts.entries_at + slot * ENTRY_BYTES
        self.memory[at : at + ENTRY_BYTES] = np.frombuffer(entry, dtype=np.uint8)
        self.contents[key] = content

    def sequence(self, key: bytes) -> np.ndarray:
        slot, _ = self.slot_of(key)
        at = (self.facts.entries_at + slot * ENTRY_BYTES) // 8
        return self.words[at : at + 1]

    @property
    def told(self) -> tuple[object, int, int, int]:
        return self.memory, self.facts.tags_at, self.facts.entries_at, self.facts.buckets

    def index(self) -> Index:
        descriptor = os.memfd_create("test")
        os.write(descriptor, self.memory.tobytes())
        return Index(descriptor, 5)


def find(copies: native.Copies, world: World, keys: list[bytes]) -> tuple[np.ndarray, tuple]:
    table = np.zeros((len(keys), native.FOUND_COLUMNS), dtype=np.uint64)
    return table, copies.find(*world.told, tuple(keys), DIGEST, SEED, 0, table)


def read(
    copies: native.Copies, world: World, table: np.ndarray, into: object, ranges: object = None
) -> list[int]:
    verdicts = bytearray(b"\x09" * len(table))
    args = (0, len(table), {0: world.segment}, into, ranges, False, verdicts)
    copies.read(*world.told, table, *args)  # type: ignore[arg-type] # wrong ones on purpose
    return list(verdicts)


def filled(rng: random.Random, count: int, **told: int) -> World:
    world = World()
    for i in range(count):
        content = rng.randbytes(rng.randint(1, UNIT_BYTES))
        world.show(bytes([i]) * rng.choice([8, 32, 64]), i, content, **told)
    return world


@pytest.mark.parametrize("seed", range(20))
def test_it_finds_what_python_finds(copies: native.Copies, seed: int) -> None:
    """Among them entries that are being written, that are torn, and tags without an entry."""
    rng = random.Random(seed)
    world = filled(rng, 50)
    for key in rng.sample(list(world.contents), 12):
        slot, _ = world.slot_of(key)
        at = world.facts.entries_at + slot * ENTRY_BYTES
        world.memory[at + rng.randrange(ENTRY_BYTES)] ^= 1 << rng.randrange(8)
    index = world.index()
    for length in (8, 32, 64):
        keys = [bytes([i]) * length for i in range(60)]
        rng.shuffle(keys)
        table, (absent, odd, total, segments) = find(copies, world, keys)
        for found in (
            index.find(keys, DIGEST, SEED),
            index.find_many(keys, DIGEST, SEED).singly(),
        ):
            is_there = [size > 0 for size in found.lengths]
            assert table[:, native.LENGTH].tolist() == found.lengths
            assert (absent, odd, total) == (is_there.count(False), found.odd, sum(found.lengths))
            for column, theirs in (
                (native.SLOT, found.slots),
                (native.SEQUENCE, found.sequences),
                (native.CHECKSUM, found.checksums),
                (native.GENERATION, found.generations),
                (native.SEGMENT, found.segments),
                (native.OFFSET, found.offsets),
            ):
                mine = table[:, column].tolist()
                assert [m for m, there in zip(mine, is_there, strict=True) if there] == [
                    t for t, there in zip(theirs, is_there, strict=True) if there
                ]
        assert segments == {s for s, there in zip(found.segments, is_there, strict=True) if there}


@pytest.mark.parametrize("length", [8, 32, 64])
def test_tags_are_looked_for_as_python_does(
    copies: native.Copies, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = filled(random.Random(length), 50)
    index, every = world.index(), [bytes([i]) * length for i in range(60)]
    batches = [[key] for key in every] + [every[50:], every[49:], every[::7], []]
    for batch in batches:
        packed = b"".join(batch)
        is_there = any(key in world.contents for key in batch)
        assert copies.may_have(*world.told, packed, length, SEED) is is_there
        with monkeypatch.context() as without:
            without.setattr(native, "copies", None)
            assert index.may_have(packed, length, SEED) is is_there
        assert index.may_have(packed, length, SEED) is is_there
    assert not copies.may_have(*world.told, every[0], length, SEED + 1)
    for packed, key_bytes in ((every[0][:-1], length), (every[0], 0), (every[0], -1)):
        with pytest.raises(ValueError, match="whole keys"):
            copies.may_have(*world.told, packed, key_bytes, SEED)


def test_another_namespace_finds_nothing(copies: native.Copies) -> None:
    world = filled(random.Random(1), 10)
    table = np.zeros((1, native.FOUND_COLUMNS), dtype=np.uint64)
    for key in world.contents:
        assert copies.find(*world.told, (key,), DIGEST[::-1], SEED, 0, table) == (1, 0, 0, set())


def test_an_entry_that_is_being_written_or_whose_key_goes_on_is_not_there(
    copies: native.Copies,
) -> None:
    world = World()
    world.show(b"w" * 32, 0, b"content", sequence=3)
    world.show(b"l" * 32, 1, b"content", key_bytes=64)
    world.show(b"e" * 32, 2, b"content", length=0)
    keys = [b"w" * 32, b"l" * 32, b"e" * 32]
    _, found = find(copies, world, keys)
    assert found == (3, 1, 0, set())


@pytest.mark.parametrize("kind", ["one array", "arrays", "spreads"])
def test_it_reads_what_is_there_and_tells_what_is_not(copies: native.Copies, kind: str) -> None:
    world = filled(random.Random(3), 40)
    keys = [key for key in world.contents if len(key) == 32]
    keys.insert(3, b"x" * 32)
    changed, mismatched = keys[0], keys[5]
    start = keys[5][0] * UNIT_BYTES
    world.segment[start] ^= 1
    table, (absent, odd, total, _) = find(copies, world, keys)
    assert (absent, odd) == (1, 0)
    world.sequence(changed)[0] += 2
    lengths = table[:, native.LENGTH].tolist()
    arrays = [np.zeros(length, dtype=np.uint8) for length in lengths]
    into: object = np.zeros(total, dtype=np.uint8)
    if kind == "arrays":
        into = tuple(arrays)
    elif kind == "spreads":
        into = tuple([copies.spread((a[:99], a[99:])) for a in arrays])
    verdicts = read(copies, world, table, into)
    expected = {changed: native.CHANGED, mismatched: native.MISMATCHED, keys[3]: native.MISS}
    assert verdicts == [expected.get(key, native.HIT) for key in keys]
    for i, key in enumerate(keys):
        row = arrays[i]
        if isinstance(into, np.ndarray):
            first = int(table[i, native.START])
            row = into[first : first + lengths[i]]
        if key not in expected:
            assert row.tobytes() == world.contents[key]


def test_ranges_of_blocks_are_read(copies: native.Copies) -> None:
    world = World()
    content = random.Random(1).randbytes(3 * UNIT_BYTES)
    world.show(b"k" * 32, 5, content)
    table, _ = find(copies, world, [b"k" * 32])
    buffer = np.zeros(700, dtype=np.uint8)
    spread = copies.spread((buffer,))
    assert read(copies, world, table, (spread,), ((10, 300), (5000, 400))) == [native.HIT]
    assert buffer.tobytes() == content[10:310] + content[5000:5400]


@pytest.mark.parametrize(
    "told",
    [
        {"segment": 1},
        {"unit": UNITS},
        {"unit": 2**32 - 1},
        {"length": UNITS * UNIT_BYTES},
        {"length": 2**56 - 1},
    ],
)
def test_a_place_outside_of_its_segment_is_never_read(
    copies: native.Copies, told: dict[str, int]
) -> None:
    world = filled(random.Random(4), 3)
    world.show(b"k" * 32, 7, b"content", **told)
    table, _ = find(copies, world, [b"k" * 32])
    into = np.zeros(64, dtype=np.uint8)
    with pytest.raises(LookupError):
        read(copies, world, table, into)
    assert not into.any()


def test_targets_that_do_not_fit_are_refused_before_the_first_byte(copies: native.Copies) -> None:
    world = World()
    keys = [bytes([i]) * 32 for i in range(3)]
    for i, key in enumerate(keys):
        world.show(key, i, b"\1" * 1000)
    table, _ = find(copies, world, keys)
    good = [np.zeros(1000, dtype=np.uint8) for _ in keys]
    frozen = np.zeros(1000, dtype=np.uint8)
    frozen.flags.writeable = False
    objects = np.full(125, None, dtype=object)
    short, long = np.zeros(999, dtype=np.uint8), np.zeros(1001, dtype=np.uint8)
    for last in (short, long, frozen, objects, None):
        with pytest.raises((ValueError, BufferError, TypeError)):
            read(copies, world, table, (*good[:2], last))
    for into in (np.zeros(2999, dtype=np.uint8), tuple(good[:2]), (*good, good[0])):
        with pytest.raises(ValueError, match="a"):
            read(copies, world, table, into)
    assert not any(each.any() for each in good)
    table[1, native.SLOT] = BUCKETS * WAYS
    with pytest.raises(ValueError, match="slot"):
        read(copies, world, table, tuple(good))


def test_memory_that_is_no_projection_of_its_size_is_refused(copies: native.Copies) -> None:
    world = World()
    memory, tags_at, entries_at, buckets = world.told
    table = np.zeros((1, native.FOUND_COLUMNS), dtype=np.uint64)
    for told in (
        (world.memory[:-8], tags_at, entries_at, buckets),
        (world.memory[4:], tags_at, entries_at, buckets),
        (memory, tags_at, entries_at, 2 * buckets),
        (memory, tags_at, entries_at, buckets - 1),
        (memory, tags_at, entries_at, 0),
        (memory, tags_at, entries_at, 1 << 62),
        (memory, tags_at + 8, entries_at, buckets),
        (memory, entries_at + 8, entries_at, buckets),
        (memory, tags_at, -8, buckets),
    ):
        with pytest.raises(ValueError, match="projection"):
            copies.find(*told, (b"k" * 32,), DIGEST, SEED, 0, table)


@pytest.mark.parametrize("seed", range(20))
def test_random_memory_gives_no_block_and_no_crash(copies: native.Copies, seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    world.memory[:] = np.frombuffer(rng.randbytes(world.memory.size), dtype=np.uint8)
    keys = [rng.randbytes(rng.randint(8, 64)) for _ in range(200)]
    for key in keys:  # so that entries are looked at at all
        low, high = key_batch(key, len(key), SEED).fingerprints[0].tolist()
        slot = (high & BUCKETS - 1) * WAYS + rng.randrange(WAYS)
        world.words[world.facts.tags_at // 8 + slot] = low
    _, (absent, odd, total, segments) = find(copies, world, keys)
    assert (absent, total, segments) == (200, 0, set())
    assert odd > 50


@pytest.mark.parametrize("seed", range(20))
def test_entries_that_lie_give_the_right_bytes_or_none(copies: native.Copies, seed: int) -> None:
    """Whole entries with any place and any length, as no daemon writes them."""
    rng = random.Random(seed)
    world = World()
    for i in range(40):
        told = {}
        for name, most in (("segment", 1), ("unit", 2 * UNITS), ("length", 3 * UNIT_BYTES)):
            if rng.random() < 0.3:
                told[name] = rng.randint(0, most)
        world.show(bytes([i]) * 32, i, rng.randbytes(rng.randint(1, UNIT_BYTES)), **told)
    outcomes = []
    for key, content in world.contents.items():
        table, (absent, _, total, _) = find(copies, world, [key])
        into = np.zeros(total, dtype=np.uint8)
        try:
            (verdict,) = read(copies, world, table, into)
        except LookupError:
            verdict = -1
        outcomes.append(verdict)
        assert verdict != native.HIT or into.tobytes() == content
        assert absent == (verdict == native.MISS)
    assert {native.HIT, -1} < set(outcomes)


def test_a_block_that_is_written_over_while_it_is_read_is_never_half_of_each(
    copies: native.Copies,
) -> None:
    """As a daemon does it, in a thread: both copy without the GIL."""
    world, key = World(), b"k" * 32
    versions = [np.full(UNITS * UNIT_BYTES, fill, dtype=np.uint8) for fill in (1, 2)]
    world.show(key, 0, versions[0].tobytes())
    slot, _ = world.slot_of(key)
    at = world.facts.entries_at + slot * ENTRY_BYTES
    whole = {}
    for version in versions:
        world.show(key, 0, version.tobytes())
        whole[int(version[0])] = world.memory[at + 8 : at + ENTRY_BYTES].copy()
    sequence, stop = world.sequence(key), threading.Event()

    def write() -> None:
        while not stop.is_set():
            for version in versions:
                sequence[0] += 1
                np.copyto(world.segment, version)
                world.memory[at + 8 : at + ENTRY_BYTES] = whole[int(version[0])]
                sequence[0] += 1
                stop.wait(1e-4)

    seen = dict.fromkeys(range(4), 0)
    writer = threading.Thread(target=write)
    writer.start()
    into = np.zeros(UNITS * UNIT_BYTES, dtype=np.uint8)
    ends_s = time.monotonic() + 1.5
    while time.monotonic() < ends_s:
        table, _ = find(copies, world, [key])
        (verdict,) = read(copies, world, table, into)
        seen[verdict] += 1
        assert verdict != native.HIT or into.min() == into.max()
    stop.set()
    writer.join()
    assert seen[native.HIT] > 0
    assert seen[native.CHANGED] + seen[native.MISS] > 0


assert layout.VERSION == 1, "the entries of this file are made by hand"
