"""The tiers that tests use keep the same promises, and the faulty one breaks them only as told."""

import random

import pytest

from kvstored.errors import Corrupt, NoSpace, Unavailable
from kvstored.tiers.base import Tier, ref_of
from kvstored.tiers.faulty import Faults, FaultyTier
from kvstored.tiers.memory import MemoryTier
from kvstored.tiers.record import Record
from tests.tiers.conformance import Conformance, empty, piece, run_of, write_one


class TestMemoryConforms(Conformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return MemoryTier()


class TestFaultyWithoutFaultsConforms(Conformance):
    @pytest.fixture
    def tier(self) -> Tier:
        return faulty(Faults())


def faulty(faults: Faults, seed: int = 1, waits: list[float] | None = None) -> FaultyTier:
    sleep = (waits if waits is not None else []).append
    return FaultyTier(MemoryTier(), faults, random.Random(seed), sleep)


def outcomes(seed: int) -> list[type]:
    tier = faulty(Faults(no_space=0.2, write_error=0.2, read_error=0.2, bit_flip=0.3), seed)
    written = tier.write([piece(i, run_of(i * 2, 5000), 5000) for i in range(1, 100)])
    stored = [record for record in written if isinstance(record, Record)]
    read = tier.read([(ref_of(record), record.place, empty(5000)) for record in stored])
    return [type(outcome) for outcome in [*written, *read]]


def test_each_fault_happens_and_the_same_seed_gives_the_same_ones() -> None:
    assert {Record, NoSpace, Unavailable, Corrupt} == set(outcomes(1))
    assert outcomes(1) == outcomes(1)
    assert outcomes(1) != outcomes(2)


def test_a_flipped_bit_is_corrupt() -> None:
    tier = faulty(Faults(bit_flip=1.0))
    stored = write_one(tier, *piece(1, run_of(0, 5000), 5000))
    assert isinstance(tier.read([(ref_of(stored), stored.place, empty(5000))])[0], Corrupt)


def test_calls_are_delayed_within_the_bound() -> None:
    waits: list[float] = []
    tier = faulty(Faults(delay_s_max=0.5), waits=waits)
    for _ in range(20):
        tier.discard([])
    assert len(waits) == 20
    assert 0 < min(waits) < max(waits) <= 0.5
