"""A real `kvstored serve` of a test, with what kills, restarts and asks it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstored.client import Client
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb

ROOT = Path(__file__).parents[2]
ANSWER_S = 30.0
"""Loose: this machine may be busy with other tests. bench/restart.py measures."""


def wait_until(is_so: Callable[[], object], wait_s: float = ANSWER_S, what: str = "") -> None:
    deadline_s = time.monotonic() + wait_s
    while not is_so():
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not so after {wait_s:.0f} s: {what or is_so}")
        time.sleep(0.01)


def environment() -> dict[str, str]:
    """Without settings of the machine's own daemon. Where packages were carried along (scripts/gpu-check) it finds them too."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("KVSTORED_")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**clean, "PYTHONPATH": path, "KVSTORED_LOG_FORMAT": "json"}


def kvstored(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstored", *arguments],
        env={**environment(), **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class Served:
    """`settings`: keys of the configuration beside the sizes."""

    def __init__(
        self,
        folder: Path,
        *,
        dram: str = "256MiB",
        disk: str = "1GiB",
        listen: str = "off",
        metrics_listen: str = "off",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.state_dir = folder / "state"
        self.socket = folder / "s"
        self.address = f"unix://{self.socket}"
        self.listen = listen
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._environ = {
            "KVSTORED_" + key.replace(".", "_").upper(): value
            for key, value in (settings or {}).items()
        }
        self._command = [
            *("--state-dir", str(self.state_dir)),
            *("--socket", str(self.socket)),
            *("--dram", dram),
            *("--disk", disk),
            *("--listen", listen),
            *("--metrics-listen", metrics_listen),
        ]

    def slowed(self) -> Path:
        """From its next start on reads of blocks from its disk take seconds while the file exists."""
        flag = self.state_dir.parent / "slow"
        path = f"{Path(__file__).parent / 'slow_disk'}:{ROOT}"
        self._environ |= {"PYTHONPATH": path, "SLOW_DISK_FLAG": str(flag)}
        return flag

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstored", "serve", *self._command],
                env={**environment(), **self._environ},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.answered()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    # ---- asking

    def stat(self) -> pb.StatResponse:
        with Client(self.address, timeout_s=20.0) as client:
            return client.call("Stat", pb.StatRequest(), pb.StatResponse)

    def try_stat(self) -> pb.StatResponse | None:
        try:
            return self.stat()
        except KvstoredError:
            return None

    def answered(self, after_epoch: int = 0) -> pb.StatResponse:
        """The first answer of a daemon that began later than this epoch."""
        found: list[pb.StatResponse] = []

        def is_there() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"serve ended with {self.process.returncode}: {self.tail()}")
            stat = self.try_stat()
            if stat is not None and stat.epoch > after_epoch:
                found.append(stat)
            return bool(found)

        wait_until(is_there, what="the daemon answers")
        return found[0]

    def recovered(self) -> pb.StatResponse:
        """Once its scans are done."""
        wait_until(lambda: not self.stat().recovering, what="recovery ends")
        return self.stat()

    def tail(self) -> str:
        return self.log.read_text()[-3000:] if self.log.exists() else ""

    # ---- ending

    def kill_daemon(self) -> pb.StatResponse:
        """-9 to the daemon alone. What it said last."""
        stat = self.stat()
        os.kill(stat.daemon_pid, signal.SIGKILL)
        return stat

    def kill_both(self) -> pb.StatResponse:
        """-9 to keeper and daemon."""
        stat = self.stat()
        assert stat.keeper_pid == self.process.pid
        os.kill(stat.keeper_pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # the kernel killed it with its keeper
            os.kill(stat.daemon_pid, signal.SIGKILL)
        self.process.wait(10)
        return stat

    def restart(self) -> None:
        done = kvstored("restart", "--state-dir", str(self.state_dir))
        assert done.returncode == 0, done.stderr

    def terminate(self, wait_s: float = 45.0) -> int:
        """SIGTERM to the keeper; its exit code."""
        self.process.terminate()
        return self.process.wait(wait_s)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(45)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()
        if error is not None:
            error.add_note(self.tail())
