"""Cores by affinity and by quotas of control groups, of both versions, wherever in the hierarchy they are set."""

import os
from pathlib import Path

import pytest

from kvstored.cores import usable_cores

HERE = float(len(os.sched_getaffinity(0)))


def files(root: Path, told: dict[str, str]) -> tuple[Path, Path]:
    for name, text in told.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "cgroup", root / "self"


@pytest.mark.parametrize(
    ("told", "cores"),
    [
        ({}, HERE),
        ({"self": "0::/\n", "cgroup/cpu.max": "max 100000\n"}, HERE),
        ({"self": "0::/\n", "cgroup/cpu.max": "50000 100000\n"}, 0.5),
        ({"self": "0::/a/b\n", "cgroup/a/cpu.max": "25000 100000\n"}, 0.25),
        (
            {
                "self": "0::/a/b\n",
                "cgroup/a/cpu.max": "75000 100000\n",
                "cgroup/a/b/cpu.max": "50000 100000",
            },
            0.5,
        ),
        (
            {
                "self": "7:cpuset:/x\n4:cpu,cpuacct:/a\n",
                "cgroup/cpu/a/cpu.cfs_quota_us": "30000\n",
                "cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "cgroup/cpu/x/cpu.max": "10 100",
            },
            0.3,
        ),
        (
            {
                "self": "4:cpu:/a\n",
                "cgroup/cpu/a/cpu.cfs_quota_us": "-1\n",
                "cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
            },
            HERE,
        ),
        ({"self": "0::/\n", "cgroup/cpu.max": "no number\n"}, HERE),
        ({"self": "0::/\n", "cgroup/cpu.max": "100 0\n"}, HERE),
    ],
)
def test_the_least_of_them_counts(tmp_path: Path, told: dict[str, str], cores: float) -> None:
    assert usable_cores(*files(tmp_path, told)) == pytest.approx(cores)


def test_of_this_process_it_is_some() -> None:
    assert 0 < usable_cores() <= HERE
