"""`kvstored clean` takes what a daemon left, asks first, and touches nothing else."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.statedir import StateLock
from tests.cli.conftest import Served, done, run, told


@pytest.fixture
def left(bare: Path) -> Path:
    """A state directory as a daemon leaves it, with a stranger's file in it and in its disk directory."""
    index = bare / "disk" / "index"
    index.mkdir(parents=True)
    for path in (
        *(
            bare / "namespaces.json",
            bare / "namespaces.json.copy",
            bare / "epoch",
            bare / "notes.txt",
        ),
        *(bare / "disk" / "slab-00000.dat", index / "data.mdb", index / "lock.mdb"),
        bare / "disk" / "slab-00001.new",
    ):
        path.write_bytes(bytes(8192))
    return bare


def test_it_removes_the_state_and_leaves_what_is_not_its_own(left: Path) -> None:
    value = told("clean", "--yes")
    assert len(value["removed"]) == 7
    assert value["freed_bytes"] >= 6 * 8192
    assert sorted(path.name for path in left.iterdir()) == ["lock", "notes.txt"]


def test_it_asks_and_no_keeps_everything(left: Path) -> None:
    result = run("clean", input="n\n")
    assert result.exit_code == 1
    assert str(left) in result.output
    assert (left / "disk" / "slab-00000.dat").exists()
    assert run("clean", input="y\n").exit_code == 0
    assert not (left / "disk").exists()


def test_it_refuses_while_another_process_has_the_directory(left: Path) -> None:
    lock = StateLock.take(str(left))
    try:
        result = run("clean", "--yes")
    finally:
        lock.close()
    assert result.exit_code == 78
    assert f"pid={os.getpid()}" in result.stderr
    assert (left / "disk" / "slab-00000.dat").exists()


def test_it_refuses_while_a_daemon_runs(daemon: Served) -> None:
    assert run("clean", "--yes").exit_code == 78
    assert (daemon.state_dir / "epoch").exists()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        monkeypatch.setenv("KVSTORED_DISK_PATH", folder)
        yield Path(folder)


def test_a_disk_directory_elsewhere_is_left_alone_and_named(left: Path, elsewhere: Path) -> None:
    (elsewhere / "slab-00000.dat").write_bytes(b"x")
    value = told("clean", "--yes")
    assert value["kept"] == [str(elsewhere)]
    assert (elsewhere / "slab-00000.dat").exists()


def test_a_strangers_file_in_the_disk_directory_stays_with_it(left: Path) -> None:
    (left / "disk" / "mine.txt").write_text("x")
    assert f"left alone: {left / 'disk' / 'mine.txt'}" in done("clean", "--yes").stdout
    assert [path.name for path in (left / "disk").iterdir()] == ["mine.txt"]


def test_a_link_in_the_place_of_the_disk_directory_is_not_followed(
    left: Path, tmp_path: Path
) -> None:
    precious = tmp_path / "slab-00000.dat"
    precious.write_bytes(b"x")
    (left / "disk").rename(left / "before")
    (left / "disk").symlink_to(tmp_path)
    done("clean", "--yes")
    assert precious.exists()


def test_an_empty_place_is_clean_already(bare: Path) -> None:
    assert told("clean", "--yes")["removed"] == []
    assert told("clean", "--state-dir", str(bare / "none"))["removed"] == []
    assert not (bare / "none").exists()


def test_a_daemon_starts_cold_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        served = Served(Path(folder) / "state")
        served.state_dir.mkdir()
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        served.start()
        try:
            size = ("--block-bytes", "8KiB", "--block-tokens", "4")
            told("put", "m@1", "--tokens", "1,2,3,4", *size, input=bytes(8192))
        finally:
            served.stop()
        assert told("clean", "--yes")["removed"]
        # what was written today was written, whatever becomes of it
        left = {path.name for path in served.state_dir.iterdir()}
        assert left == {"lock", "written.json"}
        served.start()
        try:
            assert told("namespaces")["namespaces"] == []
        finally:
            served.stop()
