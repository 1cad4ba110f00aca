import json
from pathlib import Path

import pytest

from bench.peers.contestants import (
    BY_NAME,
    CONTESTANTS,
    COPY_2,
    ECHO,
    HASHED,
    OURS,
    OURS_COLD,
    REDIS,
    UNCHECKED,
    VIEWS,
)
from bench.peers.figures import Failed, Figure, Measured
from bench.peers.plan import COLD, GET, MIB, PUT, WARM, Shape
from bench.peers.plot import plot
from bench.peers.report import Run, duration_words, tables, target_table
from bench.peers.targets import LOOP_LAG, MATCH_1000, Checked, behind, checked

SHAPE = Shape(MIB, 64, 1)


def _figure(
    name: str, ratio: float, *, shape: Shape = SHAPE, verb: str = GET, medium: str = WARM
) -> Figure:
    rate = 10e9 * ratio
    p50_s = shape.batch_bytes / rate
    return Figure(name, shape, medium, verb, p50_s, 2 * p50_s, rate, ratio, ratio, ratio, 3)


def _cell(name: str, ratio: float, verb: str = GET) -> Measured:
    figure = _figure(name, ratio)
    return Measured(
        *(0, name, SHAPE, WARM, verb, figure.p50_s, figure.p99_s, figure.rate, 0.01, 10e9, 9)
    )


def _by_name(targets: list[Checked]) -> dict[str, Checked]:
    return {each.name: each for each in targets}


def test_a_target_without_its_cells_is_neither_met_nor_missed() -> None:
    assert {each.is_met for each in checked([], {})} == {None}


def test_targets_compare_with_the_ceiling_of_their_own_visit() -> None:
    figures = [
        _figure(UNCHECKED, 0.95),
        _figure(OURS, 0.50),
        _figure(HASHED, 0.60),
        _figure(VIEWS, 4.0),
        _figure(OURS_COLD, 0.81, medium=COLD),
        _figure(OURS, 0.79, verb=PUT),
    ]
    found = _by_name(checked(figures, {}))
    assert found["get 1 MiB x 64, leased, unchecked / shm copy"].is_met is True
    hashed = found["get 1 MiB x 64, kvstored / copy + xxh3"]
    assert hashed.is_met is False
    assert hashed.measured == 0.50 / 0.60
    assert found["get 1 MiB x 64, views (unchecked) / shm copy"].is_met is False
    assert found["get 1 MiB x 64 from disk / O_DIRECT read"].is_met is True
    assert found["put 1 MiB x 64 / shm copy"].is_met is False


def test_targets_of_ways_with_a_message_tell_what_an_echo_and_the_copy_reach() -> None:
    figures = [_figure(ECHO, 0.8), _figure(HASHED, 0.5), _figure(ECHO, 0.7, verb=PUT)]
    found = _by_name(checked(figures, {}))
    assert found["get 1 MiB x 64, leased, unchecked / shm copy"].echoed == 0.8
    # the copy takes 1, its checksum 1 more, the echo 0.25
    hashed = found["get 1 MiB x 64, kvstored leased / copy + xxh3"]
    assert hashed.echoed == pytest.approx(2 / 2.25)
    assert found["get 1 MiB x 64, kvstored / copy + xxh3"].echoed is None
    assert found["put 1 MiB x 64 / shm copy"].echoed == 0.7
    assert "a bare echo and the copy: 0.889 x" in target_table(list(found.values()))


def test_single_calls_are_compared_with_redis_and_every_peer_by_time() -> None:
    shape = Shape(4096, 1, 1)
    figures = [
        _figure(REDIS, 0.01, shape=shape),
        _figure(OURS, 0.021, shape=shape),
        _figure(REDIS, 0.02, shape=shape, verb=PUT),
        _figure("OpenLake", 0.01, shape=shape, verb=PUT),
        _figure(OURS, 0.019, shape=shape, verb=PUT),
    ]
    found = _by_name(checked(figures, {}))
    assert found["get 4 KiB x 1: p50 / Redis"].is_met is True
    assert found["put 4 KiB x 1: p50 / fastest peer"].is_met is False


def test_four_clients_together_are_compared_with_two_threads() -> None:
    four = Shape(MIB, 64, 4)
    figures = [_figure(OURS, 1.6, shape=four), _figure(COPY_2, 1.7)]
    found = _by_name(checked(figures, {}))
    assert found["get 1 MiB x 64, 4 clients together / 2-thread copy"].is_met is True


def test_probes_are_checked_against_their_bounds() -> None:
    found = _by_name(checked([], {MATCH_1000: 4.9, LOOP_LAG: 5.1}))
    assert found[MATCH_1000].is_met is True
    assert found[LOOP_LAG].is_met is False


def test_where_a_peer_is_ahead_views_do_not_count_and_neither_do_libraries() -> None:
    figures = [
        _figure(OURS, 0.5),
        _figure(UNCHECKED, 0.6),
        _figure(VIEWS, 9.0),
        _figure("OpenLake", 0.9),
        _figure(REDIS, 0.1),
        _figure("LMDB", 1.0),
    ]
    assert behind(figures) == ["get 1 MiB x 64, 1 clients: OpenLake 1.50x"]


def test_the_report_names_what_is_missing_and_what_failed_with_the_reason() -> None:
    run = Run({"cpu": "a"}, {"rounds": "1"})
    run.cells += [_cell(OURS, 0.5), _cell(REDIS, 0.1), _cell(OURS, 0.4, PUT)]
    run.failures.append(Failed(0, "OpenLake", SHAPE, WARM, GET, "the worker died"))
    run.missing["LMCache"] = "install failed"
    text = tables(run)
    for words in (
        "### get 1 MiB, warm",
        "### put 1 MiB, warm",
        "| kvstored | 5.00 GB/s",
        "- LMCache: install failed",
        "- OpenLake, get 1 MiB x 64, 1 clients: the worker died",
        "NOT MET",
        "not measured",
    ):
        assert words in text
    facts = json.loads(json.dumps(run.to_json()))
    assert [each["contestant"] for each in facts["figures"]] == [OURS, REDIS, OURS]
    assert facts["failures"][0]["reason"] == "the worker died"


def test_durations_keep_three_digits() -> None:
    assert duration_words(0.0000123) == "12 us"
    assert duration_words(0.0123) == "12.3 ms"


def test_every_contestant_has_a_name_of_its_own_and_a_verb_to_measure() -> None:
    assert len(BY_NAME) == len(CONTESTANTS)
    assert all(each.verbs for each in CONTESTANTS)
    assert all(each.verbs == (GET,) for each in CONTESTANTS if each.medium == COLD)


def test_figures_are_drawn_into_a_file(tmp_path: Path) -> None:
    path = tmp_path / "figures.png"
    plot([_figure(OURS, 0.5), _figure(OURS_COLD, 0.5, medium=COLD)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
