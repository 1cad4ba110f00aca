"""Peers' own environments, under the user's cache folder: made once, used by every later run. Nothing of the system is changed.

A Debian package that a peer needs and the system lacks is downloaded and unpacked beside it (`apt-get download`, `dpkg -x`): neither root
nor a service that starts by itself.
"""

import ctypes.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from bench.peers.adapters.base import Environment

INSTALL_S = 1500.0
_PYTHON_NEEDS = ("numpy>=2.0", "xxhash>=3.5")


class Missing(Exception):
    """A peer that cannot be had here; the text is the reason."""


def own() -> Environment:
    """The environment that the benchmark itself runs in."""
    return Environment(sys.executable, Path(sys.prefix), {})


def python_environment(
    name: str, steps: Sequence[Sequence[str]], *, needs: Sequence[str] = _PYTHON_NEEDS
) -> Environment:
    """A virtual environment with each step's `pip install` arguments in turn, and what a worker needs."""
    folder = cache_folder() / name
    python = folder / "bin" / "python"
    wanted = "\n".join(" ".join(step) for step in (needs, *steps))
    stamp = folder / "installed"
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        for step in (needs, *steps):
            _run([str(python), "-m", "pip", "install", "--quiet", *step])
        stamp.write_text(wanted)
    return Environment(str(python), folder, {})


def with_libraries(
    environment: Environment, libraries: Sequence[str], packages: Sequence[str]
) -> Environment:
    """The environment, with Debian packages beside it where the system lacks one of the libraries."""
    if all(ctypes.util.find_library(library) for library in libraries):
        return environment
    return Environment(environment.python, environment.folder, _libraries(_unpacked(packages)))


def with_program(name: str, packages: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Path of a system program and the variables that it needs, from the system or unpacked."""
    found = shutil.which(name)
    if found:
        return found, {}
    folder = _unpacked(packages)
    program = folder / "usr" / "bin" / name
    if not program.exists():
        raise Missing(f"no program {name} on this system nor in its packages {' '.join(packages)}")
    return str(program), _libraries(folder)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "kvstored-bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _unpacked(packages: Sequence[str]) -> Path:
    """The folder that they are unpacked to, as if it was the root."""
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise Missing(f"needs the Debian packages {' '.join(packages)}, and apt-get is not here")
    folder = cache_folder() / "debian"
    for package in packages:
        stamp = folder / f"{package}.unpacked"
        if stamp.is_file():
            continue
        download = folder / "download"
        shutil.rmtree(download, ignore_errors=True)
        download.mkdir(parents=True)
        _run(["apt-get", "download", package], cwd=download)
        for archive in download.glob("*.deb"):
            _run(["dpkg", "-x", str(archive), str(folder)])
        shutil.rmtree(download)
        stamp.touch()
    return folder


def _libraries(folder: Path) -> dict[str, str]:
    """The variable by which those of unpacked packages are found, of which some lie below /lib."""
    multiarch = str(sysconfig.get_config_var("MULTIARCH") or "")
    return {"LD_LIBRARY_PATH": f"{folder / 'usr/lib' / multiarch}:{folder / 'lib' / multiarch}"}


def _run(command: Sequence[str], cwd: Path | None = None) -> None:
    """Raises Missing with what it said last."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Missing(f"install failed: {error}") from error
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()] or said
        raise Missing(f"install failed: {' '.join(command[:6])}: {(errors or ['?'])[-1][:200]}")
