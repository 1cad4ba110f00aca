"""The extension is built without a warning where there is a compiler, and left out where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "kvstored" / "native"


def built(folder: Path, **environ: str) -> list[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    options = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [path.name for path in folder.rglob("*.so")]


def test_without_a_compiler_it_is_left_out(tmp_path: Path) -> None:
    assert built(tmp_path, CC="/bin/false") == []


def test_it_is_built_without_a_warning_for_every_python_from_3_11_on(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert built(tmp_path, CFLAGS="-Werror") == ["_copies.abi3.so"]


def test_every_source_is_in_the_source_distribution() -> None:
    named = (ROOT / "setup.py").read_text()
    for source in SOURCES.rglob("*.h"):
        assert f'"{source.relative_to(SOURCES).with_suffix("")}"' in named
