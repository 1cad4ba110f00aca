"""How many cores this process may use: by its affinity, and by the CPU quota of its control group and those above (systemd's CPUQuota, a container's limit).

Files as of cgroups(7): `cpu.max` of version 2, `cpu.cfs_quota_us` and `cpu.cfs_period_us` of version 1.
"""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = CGROUPS, own: Path = SELF) -> float:
    quotas = (_quota_of(folder) for folder in _folders(cgroups, own))
    return min([float(len(os.sched_getaffinity(0))), *(each for each in quotas if each > 0)])


def _folders(cgroups: Path, own: Path) -> Iterator[Path]:
    """Those of the process's groups, up to the root: in a container the root is its own."""
    for line in (_read(own) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        folder = root / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(root))


def _quota_of(folder: Path) -> float:
    """Cores, 0 where there is no quota, or none that can be read."""
    told = _read(folder / "cpu.max")
    if told is None:
        quota, period = (_read(folder / f"cpu.cfs_{what}_us") for what in ("quota", "period"))
        told = f"{quota} {period}"
    try:
        quota_us, period_us = map(int, told.split())
        return max(0.0, quota_us / period_us)
    except (ValueError, ZeroDivisionError):  # "max 100000"
        return 0.0


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
