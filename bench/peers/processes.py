"""Processes that the benchmark starts: they end with it, whatever happens, and leave nothing in /dev/shm."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

STOP_S = 5.0
SHARED = Path("/dev/shm")


class ServerFailed(Exception):
    """A server that did not start; the text is the reason."""


def dies_with_us(command: Sequence[str]) -> list[str]:
    """Where util-linux has it: the kernel kills it even if this process is killed."""
    prefix = ["setpriv", "--pdeathsig", "KILL", "--"] if shutil.which("setpriv") else []
    return [*prefix, *command]


@contextmanager
def running(
    command: Sequence[str],
    folder: Path,
    *,
    is_ready: Callable[[], bool],
    variables: Mapping[str, str],
    wait_s: float = 60.0,
    shared: Sequence[str] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """A server until the block ends. `shared`: patterns of what it may leave in /dev/shm; files that were there before stay."""
    before = _matching(shared)
    log = folder / f"{Path(command[0]).name}.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            dies_with_us(command),
            cwd=folder,
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_ready(process, is_ready, wait_s, log)
        yield process
    finally:
        stop(process)
        for left in _matching(shared) - before:
            left.unlink(missing_ok=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_ready(
    process: subprocess.Popen[bytes], is_ready: Callable[[], bool], wait_s: float, log: Path
) -> None:
    until = time.monotonic() + wait_s
    while not is_ready():
        if process.poll() is not None:
            raise ServerFailed(f"ended at its start: {_last_words(log)}")
        if time.monotonic() > until:
            raise ServerFailed(f"not ready in seconds={wait_s:.0f}: {_last_words(log)}")
        time.sleep(0.02)


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-200:] if lines else "it said nothing"


def _matching(patterns: Sequence[str]) -> set[Path]:
    return {path for pattern in patterns for path in SHARED.glob(pattern)}
