"""scripts/gpu-check where there is no GPU, or something else is missing: it says so, with the exit code for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NO_DRIVER = "raise ImportError('libcuda.so.1: cannot open shared object file')\n"
ONE_GPU = """
from types import SimpleNamespace
cuda = SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=lambda: 1))
"""


def checked(folder: Path, cupy: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    (folder / "cupy.py").write_text(cupy)
    return subprocess.run(
        [str(ROOT / "scripts/gpu-check"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_without_a_gpu_it_says_why_and_ends_with_3(tmp_path: Path) -> None:
    done = checked(tmp_path, NO_DRIVER)
    assert done.returncode == 3
    assert "no GPU can be used here: ImportError: libcuda.so.1" in done.stderr


@pytest.mark.parametrize("arguments", [("a", "b"), ("no-such-folder",)])
def test_wrong_use_ends_with_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = checked(tmp_path, NO_DRIVER, *arguments)
    assert done.returncode == 2
    assert "gpu-check: " in done.stderr


def test_wheels_are_installed_only_where_the_image_lacks_them(tmp_path: Path) -> None:
    """One that it has stays; one that it lacks but cannot be installed is an error, not a silent half."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "numpy-0.1-py3-none-any.whl").write_bytes(b"never looked at")
    assert checked(tmp_path / "a", NO_DRIVER, str(wheels)).returncode == 3
    (wheels / "surely_not_installed-0.1-py3-none-any.whl").write_bytes(b"no wheel")
    assert checked(tmp_path / "a", NO_DRIVER, str(wheels)).returncode == 2


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    (tmp_path / "cupy.py").write_text(ONE_GPU)
    done = subprocess.run(
        [str(ROOT / "scripts/gpu-check")],
        env={
            "PATH": os.environ["PATH"],
            "PYTHON": str(bare / "bin/python"),
            "PYTHONPATH": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 2
    assert "packages are missing: click grpc lmdb numpy" in done.stderr
