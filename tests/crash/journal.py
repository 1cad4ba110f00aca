"""What clients were told, kept where no crash of theirs or the daemon's can lose it; and the clients themselves."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field

from tests.crash.served import ROOT, environment


@dataclass(slots=True)
class Journal:
    """By block size. `parents`: of each key that was ever tried (empty: a root), `depth` likewise; `stored`: in the order of acknowledgement."""

    parents: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    depths: dict[int, dict[bytes, int]] = field(default_factory=dict)
    stored: dict[int, dict[bytes, None]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        what, size, *words = line.split()
        keys = [bytes.fromhex(word) for word in words]
        if what == "wrong":
            self.wrong.append(line)
        elif what == "path":
            parents = self.parents.setdefault(int(size), {})
            depths = self.depths.setdefault(int(size), {})
            for depth, (parent, key) in enumerate(zip([b"", *keys], keys, strict=False)):
                parents[key] = parent
                depths[key] = depth
        elif what == "put":
            self.stored.setdefault(int(size), {}).update(dict.fromkeys(keys))

    @property
    def blocks(self) -> int:
        return sum(map(len, list(self.stored.values())))


class Clients:
    """Processes of load.py that write into one journal."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._processes: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, address: str, size_bytes: int, seed: int, budget_bytes: int) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.load", address]
            + [str(each) for each in (size_bytes, seed, budget_bytes)],
            env=environment(),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        self._processes.append(process)
        self._readers.append(reader)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """-9, wherever they are. The journal is whole afterwards."""
        self._signal(signal.SIGKILL)
        self._reap()

    def end(self) -> None:
        """Let each finish what it is at; all must have lived until now."""
        self.thaw()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        codes = self._reap()
        assert not any(codes), f"a client failed: {codes}"

    def _reap(self) -> list[int]:
        codes = [process.wait(30) for process in self._processes]
        for reader in self._readers:
            reader.join(10)
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._processes, self._readers = [], []
        return codes

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.kill(process.pid, number)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):  # a killed client may leave half a line
                with self._lock:
                    self._journal.read(line)
