"""Visits with real workers, and with adapters that fail in the ways in which peers do."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.peers.adapters.base import Address, Bytes, Environment, Need, Store
from bench.peers.contestants import BY_NAME, Contestant
from bench.peers.environment import Missing, own, python_environment
from bench.peers.figures import Failed, Measured
from bench.peers.plan import COLD, GET, PUT, WARM, Visit, visits
from bench.peers.processes import ServerFailed, running
from bench.peers.visit import Pace, visited

PACE = Pace(budget_s=0.005, warm_up_s=0.01)
FAILING = "tests.bench.test_visit"


def _visit(name: str, medium: str = WARM, clients: Sequence[int] = (1, 2)) -> Visit:
    (visit,) = visits([(name, medium)], [4096], [1, 8], clients, 1, seed=1)
    return visit


def _children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("name", ["shm copy", "echo + shm copy", "memory copy, 2 threads", "LMDB"])
def test_a_visit_measures_every_cell_and_leaves_no_process(name: str, tmp_path: Path) -> None:
    before = _children()
    done = visited(_visit(name), BY_NAME[name], own(), PACE, tmp_path / "log")
    assert [each for each in done if isinstance(each, Failed)] == []
    assert len(done) == 2 * 4
    for cell in done:
        assert isinstance(cell, Measured)
        assert cell.samples >= 6 * cell.shape.clients
        assert 0 < cell.p50_s <= cell.p99_s
    assert _children() == before


def test_files_on_disk_are_read_once_after_their_pages_were_dropped(tmp_path: Path) -> None:
    contestant = BY_NAME["files, disk"]
    done = visited(_visit("files, disk", COLD), contestant, own(), PACE, tmp_path / "log")
    assert [each for each in done if isinstance(each, Failed)] == []
    for cell in done:
        assert isinstance(cell, Measured)
        assert (cell.verb, cell.medium) == (GET, COLD)
        assert cell.samples == cell.shape.cold_sets * cell.shape.clients


def test_kvstored_is_measured_in_its_ways(tmp_path: Path) -> None:
    for name in ("kvstored", "kvstored views"):
        visit = _visit(name, clients=(1,))
        done = visited(visit, BY_NAME[name], own(), PACE, tmp_path / "log")
        assert [each for each in done if isinstance(each, Failed)] == []


@pytest.mark.parametrize(
    ("way", "reason", "failed"),
    [
        ("dies", "the worker died", {PUT, GET}),
        ("lies", "wrong bytes", {PUT, GET}),
        ("refuses", "not stored", {PUT, GET}),
    ],
)
def test_a_peer_that_fails_costs_its_cells_and_nothing_else(
    way: str, reason: str, failed: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _children()
    monkeypatch.setattr("bench.peers.visit._module", lambda contestant: FAILING)
    monkeypatch.setattr("bench.peers.visit._peer", lambda module: _Failing())
    contestant = Contestant("failing", "failing", way)
    done = visited(_visit("failing"), contestant, own(), PACE, tmp_path / "log")
    assert len(done) == 2 * 4
    for outcome in done:
        assert isinstance(outcome, Failed)
        assert reason in outcome.reason
    assert {outcome.verb for outcome in done} == failed
    assert _children() == before


def test_a_server_that_does_not_start_says_why_and_is_stopped(tmp_path: Path) -> None:
    before = _children()
    ends = ["sh", "-c", "echo no such device >&2; exit 3"]
    hangs = ["sleep", "60"]
    for command, words, wait_s in ((ends, "no such device", 5.0), (hangs, "not ready", 0.1)):
        with (
            pytest.raises(ServerFailed, match=words),
            running(command, tmp_path, is_ready=lambda: False, variables={}, wait_s=wait_s),
        ):
            pass
    assert _children() == before


def test_what_a_server_leaves_in_shared_memory_goes_and_what_was_there_stays(
    tmp_path: Path,
) -> None:
    name = f"kvstored-test-{os.getpid()}"
    kept, left = Path(f"/dev/shm/{name}-kept"), Path(f"/dev/shm/{name}-left")
    kept.touch()
    try:
        with running(
            ["sleep", "60"], tmp_path, is_ready=lambda: True, variables={}, shared=[f"{name}-*"]
        ) as process:
            left.touch()
        assert process.poll() is not None
        assert kept.exists()
        assert not left.exists()
    finally:
        kept.unlink()
        left.unlink(missing_ok=True)


def test_a_peer_that_cannot_be_installed_is_missing_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Missing, match="install failed"):
        python_environment("absent", [["kvstored-no-such-package==0"]], needs=[])


class _Nothing:
    def __init__(self) -> None:
        self.address: Address = {}

    def chill(self) -> None:
        raise NotImplementedError


class _Failing:
    """The server side of this module as an adapter."""

    def environment(self, way: str) -> Environment:
        return own()

    @contextmanager
    def serve(self, environment: Environment, folder: Path, need: Need) -> Iterator[_Nothing]:
        yield _Nothing()


def connect(way: str, address: Address, index: int) -> Store:
    return _Fake(way)


class _Fake(Store):
    def __init__(self, way: str) -> None:
        self._way = way

    def put(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        if self._way == "dies":
            os._exit(3)
        if self._way == "refuses":
            raise KeyError("not stored")

    def get(self, keys: Sequence[bytes], buffers: Sequence[Bytes]) -> None:
        time.sleep(0.0001)

    def clear(self, keys: Sequence[bytes]) -> None:
        pass

    def close(self) -> None:
        pass
