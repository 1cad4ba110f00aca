"""A process of this engine's Python, asked by lines of JSON; every answer has a deadline."""

import json
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.crash.served import ROOT, environment

ANSWER_S = 300.0


class Worker:
    def __init__(self, module: str, log: Path) -> None:
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**environment(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        self._log = log
        self._rest = b""

    def __call__(self, call: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": call, **arguments}).encode() + b"\n")
        return json.loads(self._line(time.monotonic() + ANSWER_S))

    def log(self) -> str:
        return self._log.read_text()

    def _line(self, ends_s: float) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([stdout], [], [], max(0.0, ends_s - time.monotonic()))
            assert ready, f"the engine does not answer: {self.log()[-3000:]}"
            got = stdout.read(1 << 16)
            assert got, f"the engine ended: {self.log()[-3000:]}"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
