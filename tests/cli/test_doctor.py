"""`kvstored doctor` on this machine, and on machines, disks and settings that are broken in one way each."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstored import config, machine
from kvstored.cli import checks, checks_software
from kvstored.cli.checks import Finding, Level
from kvstored.config import Config
from kvstored.machine import MemoryLimit
from kvstored.statedir import StateLock
from tests.cli.conftest import ROOT, Served, run, told

GIB = 2**30


def settings(**flags: str) -> Config:
    """As the environment says, with these on top; `dram.capacity` is written dram_capacity."""
    return config.load(flags={name.replace("__", "."): text for name, text in flags.items()}).config


def named(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(each for each in found if each["name"] == name)


def only(findings: list[Finding], name: str) -> Finding:
    return next(each for each in findings if each.name == name)


def checked(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    result = run("doctor", "--json", *arguments)
    value = json.loads(result.stdout)
    assert value["ok"] == (result.exit_code == 0)
    return result.exit_code, value["checks"]


def test_this_machine_can_run_the_store(bare: Path) -> None:
    code, found = checked()
    assert code == 0, found
    names = {each["name"] for each in found}
    assert {"settings", "memory", "memfd", "disk space", "LMDB", "hashes", "socket"} <= names
    assert all(bool(each["remedy"]) == (each["level"] != "ok") for each in found)
    assert list(bare.iterdir()) == [], "it leaves nothing behind"


def test_a_running_daemon_is_found_with_its_version(daemon: Served) -> None:
    code, found = checked()
    assert code == 0, found
    assert named(found, "daemon")["level"] == "ok"
    assert "version" in named(found, "daemon")["text"]


def test_the_text_has_a_line_a_check_and_says_what_to_do(bare: Path) -> None:
    result = run("doctor", "--dram", "1PiB")
    assert result.exit_code == 1
    assert "fail" in result.stdout
    assert "-> " in result.stdout
    assert "\x1b[" not in result.stdout, "no colours in a pipe"


def test_a_wrong_setting_is_a_finding_not_a_crash(bare: Path) -> None:
    for flags in (["--dram", "64"], ["--socket", "/" + "x" * 120], ["--listen", "0.0.0.0:1"]):
        code, found = checked(*flags)
        assert (code, found[-1]["name"], found[-1]["level"]) == (1, "settings", "fail")


# ---- memory


@pytest.mark.parametrize(
    ("limit", "available", "level"),
    [(64 * GIB, 60 * GIB, Level.OK), (64 * GIB, GIB // 2, Level.WARN), (GIB, GIB, Level.FAIL)],
)
def test_dram_is_weighed_against_the_limit_and_what_is_free(
    limit: int, available: int, level: Level, bare: Path
) -> None:
    found = checks.memory(settings(dram__capacity="1GiB"), MemoryLimit(limit, available, "test"))
    assert [each.level for each in found] == [level]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_cgroup_limit_below_dram_fails_by_its_name(
    version: str, tmp_path: Path, bare: Path
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    root = cgroups / "memory" if version == "v1" else cgroups
    name = "memory.limit_in_bytes" if version == "v1" else "memory.max"
    (proc / "self").mkdir(parents=True)
    root.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 67108864 kB\n")
    (proc / "self" / "cgroup").write_text("4:memory:/\n" if version == "v1" else "0::/\n")
    (root / name).write_text(f"{512 * 2**20}\n")
    limit = machine.memory_limit(proc=proc, sys_cgroup=cgroups)
    found = only(checks.memory(settings(dram__capacity="1GiB"), limit), "memory")
    assert found.level is Level.FAIL
    assert str(root / name) in found.text


def test_a_missing_dev_shm_is_only_a_warning(tmp_path: Path) -> None:
    found = checks.shared_memory(tmp_path / "none")
    assert only(found, "memfd").level is Level.OK
    assert only(found, "shm").level is Level.WARN


def test_memory_files_that_are_not_allowed_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refused)
    found = only(checks.shared_memory(), "memfd")
    assert found.level is Level.FAIL
    assert "seccomp" in found.remedy


def test_too_few_open_files_are_a_warning_with_the_number(bare: Path) -> None:
    wanted = settings(dram__capacity="1GiB")
    assert only(checks.descriptors(wanted, 256), "open files").level is Level.WARN
    assert only(checks.descriptors(wanted, 65536), "open files").level is Level.OK


# ---- disk


def test_more_disk_than_the_filesystem_has_fails(bare: Path) -> None:
    found = only(checks.disk(settings(disk__capacity="1PiB")), "disk space")
    assert found.level is Level.FAIL


def test_a_disk_tier_that_is_off_needs_nothing(bare: Path) -> None:
    found = checks.disk(settings(disk__capacity="0", disk__path="/dev/null/x"))
    assert [each.level for each in found] == [Level.OK]


def test_a_file_in_the_place_of_the_disk_directory_fails(bare: Path) -> None:
    (bare / "disk").write_text("")
    found = checks.disk(settings(disk__path=str(bare / "disk")))
    assert [each.level for each in found] == [Level.FAIL]
    assert "no directory" in found[0].remedy


def test_a_directory_that_cannot_be_written_fails(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # root may write anywhere: the kernel's answer is what is replaced
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [each.level for each in checks.disk(settings())] == [Level.FAIL]
    assert only(checks_software.socket_path(settings()), "socket").level is Level.FAIL


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        ("ext4", Level.OK),
        ("tmpfs", Level.WARN),
        ("overlay", Level.WARN),
        ("nfs4", Level.FAIL),
    ],
)
def test_the_filesystem_of_the_longest_mount_point_counts(
    kind: str, level: Level, tmp_path: Path
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - xfs /dev/sda rw\n"
        f"2 1 8:2 / {tmp_path.resolve()} rw,relatime shared:1 - {kind} source rw\n"
        "3 1 8:3 / /elsewhere rw - nfs source rw\n"
    )
    found = checks.filesystem(tmp_path, mounts)
    assert (found.level, kind in found.text) == (level, True)


def test_a_filesystem_without_o_direct_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def without_direct(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", without_direct)
    assert checks.direct_io(tmp_path).level is Level.WARN
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    found = checks.direct_io(tmp_path)
    assert found.level is Level.FAIL
    assert "free space" in found.remedy


def test_lmdb_on_a_full_filesystem_fails_and_does_not_kill(bare: Path) -> None:
    """LMDB maps its table of readers: a hole in it, on a full filesystem, ended doctor by SIGBUS."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small filesystem")
    full = bare / "full"
    full.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(full)], check=True)
    try:
        (full / "filler").write_bytes(bytes(64 << 10))
        result = subprocess.run(
            [sys.executable, "-P", "-m", "kvstored", "doctor", "--json"],
            env={**os.environ, "KVSTORED_DISK_PATH": str(full), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            check=False,
        )
        found = named(json.loads(result.stdout)["checks"], "LMDB")
        assert (result.returncode, found["level"]) == (1, "fail")
        assert "No space left" in found["text"]
        assert [each.name for each in full.iterdir()] == ["filler"]
    finally:
        subprocess.run(["umount", str(full)], check=True)


def test_nothing_is_written_beside_a_directory_that_is_not_there(
    bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor --state-dir /nonexist/a` tried LMDB and O_DIRECT in `/`."""
    used: list[str] = []
    made = tempfile.TemporaryDirectory

    def noted(*, prefix: str, dir: Path) -> tempfile.TemporaryDirectory[str]:  # noqa: A002
        used.append(str(dir))
        return made(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", noted)
    wanted = settings(disk__path=str(bare / "not" / "there"))
    found = only(checks_software.lmdb_opens(wanted), "LMDB")
    checks.disk(wanted)
    assert found.level is Level.OK
    assert "is not there yet" in found.text
    assert set(used) == {tempfile.gettempdir()}


def test_a_damaged_index_fails_and_names_clean(bare: Path) -> None:
    index = bare / "disk" / "index"
    index.mkdir(parents=True)
    (index / "data.mdb").write_bytes(b"not lmdb" * 1000)
    found = only(checks_software.lmdb_opens(settings()), "disk index")
    assert found.level is Level.FAIL
    assert "kvstored clean" in found.remedy


# ---- hashes, GPU


def test_a_hash_that_differs_from_the_golden_vectors_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [each.level for each in checks_software.hashes()] == [Level.OK]
    monkeypatch.setattr(checks_software.keys, "root", lambda *_: bytes(32))
    found = checks_software.hashes()[0]
    assert found.level is Level.FAIL
    assert "root" in found.text


def test_without_cupy_nothing_is_imported_and_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_software.importlib.util, "find_spec", lambda _: None)
    assert [each.level for each in checks_software.gpu(tmp_path / "none")] == [Level.OK]
    driver = tmp_path / "version"
    driver.write_text("NVRM")
    assert "cuda12" in checks_software.gpu(driver)[0].text
    assert "cupy" not in sys.modules


@pytest.fixture
def broken_cupy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("cupy", None)


@pytest.mark.usefixtures("broken_cupy")
def test_a_cupy_that_does_not_load_is_a_warning(tmp_path: Path) -> None:
    found = checks_software.gpu(tmp_path / "none")[0]
    assert found.level is Level.WARN
    assert "libcuda" in found.text
    assert "driver" in found.remedy


# ---- socket, ports, daemon


def test_a_socket_that_others_can_replace_is_a_warning(bare: Path) -> None:
    open_to_all = bare / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    found = checks_software.socket_path(settings(socket=str(open_to_all / "s")))[0]
    assert found.level is Level.WARN
    open_to_all.chmod(0o777 | stat.S_ISVTX)
    assert checks_software.socket_path(settings(socket=str(open_to_all / "s")))[0].level is Level.OK


def test_a_file_in_the_place_of_the_socket_fails(bare: Path) -> None:
    (bare / "kvstored.sock").write_text("")
    assert checks_software.socket_path(settings())[0].level is Level.FAIL


def test_a_port_in_use_fails_while_no_daemon_runs(bare: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = checks_software.daemon(settings(listen=f"127.0.0.1:{port}"))
    assert only(found, "daemon").level is Level.OK
    assert only(found, "port").level is Level.FAIL


def test_a_keeper_whose_daemon_does_not_answer_fails(bare: Path) -> None:
    lock = StateLock.take(str(bare))
    try:
        found = only(checks_software.daemon(settings()), "daemon")
    finally:
        lock.close()
    assert found.level is Level.FAIL
    assert "restart" in found.remedy


def test_a_daemon_of_another_version_is_a_warning(
    daemon: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks_software, "__version__", "999")
    found = only(checks_software.daemon(settings()), "daemon")
    assert found.level is Level.WARN
    assert told("stat")["version"] in found.text
