"""The machine of a run in words: what a figure depends on."""

import importlib.metadata
import os
import platform
import shutil
from pathlib import Path

from bench.machine import machine

PACKAGES = ("numpy", "xxhash", "lmdb", "protobuf")


def described() -> dict[str, str]:
    facts = machine()
    facts["governor"] = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    facts["thp"] = _chosen("/sys/kernel/mm/transparent_hugepage/enabled")
    facts["thp shmem"] = _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    facts["cgroup"] = _cgroup()
    facts["libc"] = " ".join(platform.libc_ver())
    facts["GLIBC_TUNABLES"] = os.environ.get("GLIBC_TUNABLES", "unset")
    free, shared = shutil.disk_usage("/tmp").free, shutil.disk_usage("/dev/shm").free
    facts["free"] = f"/tmp {free >> 30} GiB, /dev/shm {shared >> 30} GiB"
    facts["packages"] = " ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return facts


def _cgroup() -> str:
    """Version, and the limits of CPU and memory where they can be read."""
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        limits = [_read(f"/sys/fs/cgroup/{name}") for name in ("cpu.max", "memory.max")]
        return f"v2, cpu.max {limits[0]}, memory.max {limits[1]}"
    quota = _read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
    return f"v1, cpu quota {quota}, memory {_read('/sys/fs/cgroup/memory/memory.limit_in_bytes')}"


def _chosen(path: str) -> str:
    """The word in brackets."""
    words = _read(path)
    return words.partition("[")[2].partition("]")[0] or words


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"
