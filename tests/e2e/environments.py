"""Engines in environments of their own, below the user's cache folder: made once, minutes, for every later run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

INSTALL_S = 1500


def engine_python(name: str, *steps: Sequence[str]) -> Path:
    """Python of an environment with what each step's `pip install` brings."""
    folder = cache_folder() / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join(" ".join(step) for step in steps)
    if not (stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        for step in steps:
            _run([str(python), "-m", "pip", "install", "--quiet", *step])
        stamp.write_text(wanted)
    return python


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "kvstored-engines"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
