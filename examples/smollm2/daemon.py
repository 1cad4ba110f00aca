"""A kvstored of the demo's own: in a temporary folder, without ports; what starts, kills and asks it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstored.client import Client, KvstoredError
from kvstored.pb import kvstored_pb2 as pb

ANSWER_S = 60.0
DRAM, DISK = "512MiB", "2GiB"


class Daemon:
    def __init__(self, folder: Path) -> None:
        self.address = f"unix://{folder / 's'}"
        self._log = folder / "log"
        self._client = Client(self.address, timeout_s=10)
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            sys.executable,
            "-m",
            "kvstored",
            "serve",
            "--state-dir",
            str(folder / "state"),
        ]
        self._command += ["--socket", str(folder / "s"), "--dram", DRAM, "--disk", DISK]
        self._command += ["--listen", "off", "--metrics-listen", "off"]

    def start(self) -> None:
        own = {
            name: value for name, value in os.environ.items() if not name.startswith("KVSTORED_")
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=own, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._answered()

    def kill(self) -> float:
        """-9 to the daemon; its keeper starts another one. Seconds until that one has all of its DRAM again."""
        before, began = self.stat(), time.perf_counter()
        os.kill(before.daemon_pid, signal.SIGKILL)
        self._answered(after_epoch=before.epoch)
        return time.perf_counter() - began

    def kill_all(self) -> float:
        """-9 to the keeper too, which loses DRAM, once all is on disk; and a start anew."""
        while (stat := self.stat()).tiers[1].dirty_copies:
            time.sleep(0.05)
        began = time.perf_counter()
        for pid in (stat.keeper_pid, stat.daemon_pid):
            with contextlib.suppress(ProcessLookupError):  # a daemon dies with its keeper
                os.kill(pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(10)
        self.start()
        return time.perf_counter() - began

    def stat(self) -> pb.StatResponse:
        return self._client.call("Stat", pb.StatRequest(), pb.StatResponse)

    def _answered(self, after_epoch: int = 0) -> None:
        """Until a daemon that began later than this epoch has read what was there before it."""
        ends_s = time.monotonic() + ANSWER_S
        while time.monotonic() < ends_s:
            with contextlib.suppress(KvstoredError):
                stat = self.stat()
                if stat.epoch > after_epoch and not stat.recovering:
                    return
            time.sleep(0.01)
        raise RuntimeError(f"the daemon does not answer: {self._log.read_text()[-2000:]}")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(ANSWER_S)
