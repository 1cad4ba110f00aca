"""What a replay counts: latencies to 2 %, time buckets that coarsen, and merging over clients."""

import numpy as np
import pytest

from kvstored.sim.measure import BUCKETS_MAX, NO_BLOCKS, Recorder, Served, bin_of, quantiles


def served(blocks: int = 4, dram: int = 1) -> Served:
    return Served(blocks, (0, dram, 0, 0), blocks - dram, latencies_s={"match": [1e-3]})


def test_quantiles_are_right_to_two_percent() -> None:
    seconds = np.random.Generator(np.random.Philox(1)).lognormal(-8, 2, 5000)
    bins = np.bincount([bin_of(value) for value in seconds], minlength=1200)
    found = quantiles(bins)
    assert found.count == 5000
    assert found.p50_ms == pytest.approx(np.quantile(seconds, 0.5) * 1e3, rel=0.021)
    assert found.p99_ms == pytest.approx(np.quantile(seconds, 0.99) * 1e3, rel=0.05)


def test_nothing_recorded_has_no_quantiles_and_no_buckets() -> None:
    recorder = Recorder()
    assert recorder.latencies()["request"].count == 0
    assert recorder.buckets() == ()


def test_a_long_trace_keeps_its_totals_in_a_bounded_number_of_buckets() -> None:
    recorder = Recorder()
    for minute in range(10_000):
        recorder.add(minute * 60.0, served(), 0.01)
    buckets = recorder.buckets()
    assert 32 <= len(buckets) <= BUCKETS_MAX
    assert sum(bucket.requests for bucket in buckets) == 10_000
    assert sum(bucket.hits[1] for bucket in buckets) == 10_000
    assert sum(bucket.latency.count for bucket in buckets) == 10_000


def test_merging_clients_equals_recording_with_one() -> None:
    one, first, second = Recorder(), Recorder(), Recorder()
    for i in range(1000):
        one.add(i * 1.0, served(), 0.001 * i)
        (first if i < 100 else second).add(i * 1.0, served(), 0.001 * i)
    first.merge(second)
    assert first.buckets() == one.buckets()
    assert first.latencies() == one.latencies()
    assert (first.requests, first.blocks, first.hits) == (one.requests, one.blocks, one.hits)
    assert first.put_blocks == one.put_blocks
    assert one.hits != NO_BLOCKS
