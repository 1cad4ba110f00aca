"""The files around the package: lock, unit, image, licence."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvstored import config

ROOT = Path(__file__).parent.parent
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _name(requirement: str) -> str:
    matched = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert matched, requirement
    return re.sub(r"[-_.]+", "-", matched[0]).lower()


def _tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def test_the_lock_holds_every_dependency_at_a_version_that_the_project_allows() -> None:
    locked = dict(re.findall(r"^([a-z0-9.-]+)==([0-9.]+)", LOCK, re.MULTILINE))
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *extras["dev"], *extras["plot"]]:
        assert _name(requirement) in locked, requirement
        (least,) = re.findall(r">=([0-9.]+)", requirement)
        assert _tuple(locked[_name(requirement)]) >= _tuple(least), requirement


@pytest.mark.parametrize(
    "name", ["requirements.lock", "pyproject.toml", "Dockerfile", "Makefile", ".ci/run"]
)
def test_no_file_names_a_registry_or_a_place_of_some_machine(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.findall(r"https?://(?!127\.0\.0\.1)\S+", text)
    assert not re.findall(
        r"--(?:extra-)?index-url|--find-links|--trusted-host|file:/|/home/|/work/|/root/", text
    )


def test_the_lock_pins_exactly() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"[a-z0-9.-]+==[0-9.]+\s", line) for line in lines)


def test_cupy_is_an_extra_for_each_cuda_and_no_dependency() -> None:
    assert {"cuda12", "cuda13", "plot", "dev"} <= PROJECT["optional-dependencies"].keys()
    assert not any("cupy" in requirement for requirement in PROJECT["dependencies"])


def test_the_unit_is_valid(tmp_path: Path) -> None:
    """With an ExecStart that is there; systemd-analyze is on every machine with systemd."""
    analyze = shutil.which("systemd-analyze")
    unit = (ROOT / "systemd" / "kvstored.service").read_text()
    for line in ("Type=notify", "NotifyAccess=main", "FileDescriptorStoreMax=4096"):
        assert line in unit
    if analyze is None:
        return
    path = tmp_path / "kvstored.service"
    path.write_text(unit.replace("/opt/kvstored/bin/kvstored", sys.executable))
    verified = subprocess.run(
        [analyze, "verify", "--man=no", str(path)], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")


def test_the_units_stop_timeout_covers_draining() -> None:
    unit = (ROOT / "systemd" / "kvstored.service").read_text()
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    loaded = config.load(environ={"HOME": "/"}, file=ROOT / "systemd" / "kvstored.toml")
    assert loaded.config.limits.drain_s + 10 < int(timeout_s)


def test_the_example_configuration_loads() -> None:
    loaded = config.load(environ={"HOME": "/"}, file=ROOT / "systemd" / "kvstored.toml").config
    assert loaded.dram.capacity_bytes == 64 * 2**30
    assert str(loaded.socket) == "/run/kvstored/kvstored.sock"


def test_the_image_runs_unprivileged_and_checks_its_health() -> None:
    image = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER kvstored$", image, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", image, re.MULTILINE)
    assert len(re.findall(r"^FROM \S+-slim", image, re.MULTILINE)) == 2
    environ = dict(re.findall(r"(KVSTORED_\w+)=(\S+)", image))
    loaded = config.load(environ={"HOME": "/", **environ}).config
    assert str(loaded.listen) == "unix:/run/kvstored/grpc.sock"


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
