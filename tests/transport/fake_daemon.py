"""A fake daemon in a process of its own, for tests that need a real one to die."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from kvstored.clock import SystemClock

NOW = SystemClock()
ROOT = Path(__file__).resolve().parents[2]


class FakeDaemon:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.epoch = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        self.epoch += 1
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transport.fake_service", self.path, str(self.epoch)],
            cwd=ROOT,
        )
        ends = NOW.now_s() + 20
        while NOW.now_s() < ends:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.path)) == 0:
                    return
            assert self.process.poll() is None, "the fake daemon ended at once"
            time.sleep(0.02)
        raise AssertionError("the fake daemon does not answer")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)
