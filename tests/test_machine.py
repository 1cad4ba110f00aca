from pathlib import Path

import pytest

from kvstored import machine

MEMINFO = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 800 kB\n"


def _proc(tmp_path: Path, cgroup: str) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(MEMINFO)
    (proc / "self" / "cgroup").write_text(cgroup)
    return proc


def _write(directory: Path, **files: object) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    limit = machine.memory_limit(proc=_proc(tmp_path, ""), sys_cgroup=tmp_path / "none")
    assert limit == machine.MemoryLimit(1000 * 1024, 800 * 1024, "machine")


def test_the_tightest_parent_of_a_v2_cgroup_is_the_limit(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    own = {"memory__max": 900_000, "memory__current": 100_000}
    _write(root / "a" / "b", **own, memory__stat="inactive_file 40000")
    _write(root / "a", memory__max=500_000, memory__current=450_000)
    limit = machine.memory_limit(proc=_proc(tmp_path, "0::/a/b\n"), sys_cgroup=root)
    assert limit.limit_bytes == 500_000
    assert limit.available_bytes == 50_000
    assert str(root / "a" / "memory.max") in limit.source


def test_max_is_no_limit_and_a_container_sees_its_own_root(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    _write(root, memory__max="max", memory__current=5)
    proc = _proc(tmp_path, "0::/../host/path\n")
    assert machine.memory_limit(proc=proc, sys_cgroup=root).source == "machine"
    _write(root, memory__max=300_000)
    assert machine.memory_limit(proc=proc, sys_cgroup=root).limit_bytes == 300_000


def test_a_v1_cgroup_limits_and_its_huge_number_does_not(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    group = root / "memory" / "job"
    _write(root / "memory", memory__limit_in_bytes=9223372036854771712)
    _write(group, memory__limit_in_bytes=600_000, memory__usage_in_bytes=200_000)
    proc = _proc(tmp_path, "4:memory:/job\n3:cpu:/\n0::/\n")
    limit = machine.memory_limit(proc=proc, sys_cgroup=root)
    assert (limit.limit_bytes, limit.available_bytes) == (600_000, 400_000)


def test_disk_space_of_a_path_to_come_is_its_nearest_parents(tmp_path: Path) -> None:
    space = machine.disk_space(tmp_path / "to" / "come")
    assert space.filesystem == str(tmp_path)
    assert 0 < space.free_bytes <= space.total_bytes


def test_allocated_bytes_count_blocks_and_not_holes(tmp_path: Path) -> None:
    with (tmp_path / "slab").open("wb") as file:
        file.truncate(2**30)
        file.write(b"x" * 8192)
    assert 0 < machine.allocated_bytes(tmp_path) < 2**20
    assert machine.allocated_bytes(tmp_path / "none") == 0


def test_free_memory_can_be_given_back_where_the_c_library_can() -> None:
    assert machine.give_back_free_memory() in {True, False}


@pytest.mark.parametrize(
    ("path", "is_so"),
    [
        ("/dev/shm/kvstored", True),
        ("/dev/shmother", False),
        ("/home/a", False),
        ("/mnt/with space/x", True),
        ("/mnt/with space/disk/x", False),
    ],
)
def test_whether_files_take_memory_is_told_by_the_nearest_mount(
    tmp_path: Path, path: str, is_so: bool
) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/vda / ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
        "tmpfs /mnt/with\\040space tmpfs rw 0 0\n/dev/vdb /mnt/with\\040space/disk xfs rw 0 0\n"
    )
    assert machine.lies_in_memory(Path(path), mounts=mounts) is is_so
    assert not machine.lies_in_memory(Path(path), mounts=tmp_path / "none")
