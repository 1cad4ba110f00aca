"""The benchmark's side of its worker processes: commands out, times in, and an end for each of them whatever happens."""

import json
import os
import select
import subprocess
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from bench.machine import REPOSITORY
from bench.peers.adapters.base import Address, Environment
from bench.peers.figures import Taken
from bench.peers.processes import dies_with_us, stop

START_S, REPLY_S = 60.0, 60.0
START_DELAY_S = 0.01
"""Between the command to sample and its start: all clients are awake by then."""


class PeerFailed(Exception):
    """A worker or what it speaks to failed; the text is the reason."""


class WorkerLost(PeerFailed):
    """It died or does not answer: nothing more comes from this visit."""


class Worker:
    def __init__(self, environment: Environment, log: int) -> None:
        self._process = subprocess.Popen(
            dies_with_us([environment.python, "-m", "bench.peers.worker"]),
            cwd=REPOSITORY,
            env=os.environ | environment.variables | {"PYTHONPATH": str(REPOSITORY)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        assert self._process.stdin is not None, "a pipe was asked for"
        assert self._process.stdout is not None, "a pipe was asked for"
        self._input, self._output = self._process.stdin, self._process.stdout
        self._received = b""

    # Any: the fields of JSON objects
    def send(self, do: str, **fields: Any) -> None:
        try:
            self._input.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self._input.flush()
        except OSError as error:
            raise WorkerLost(f"the worker died: code={self._process.poll()}") from error

    def receive(self, wait_s: float) -> dict[str, Any]:
        until = time.monotonic() + wait_s
        while b"\n" not in self._received:
            left_s = until - time.monotonic()
            if left_s <= 0 or not select.select([self._output], [], [], left_s)[0]:
                raise WorkerLost(f"no answer in seconds={wait_s:.0f}")
            came = os.read(self._output.fileno(), 1 << 20)
            if not came:
                raise WorkerLost(f"the worker died: code={self._process.wait(10)}")
            self._received += came
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer

    def close(self) -> None:
        try:
            self.send("close")
            self._process.wait(5)
        except (PeerFailed, subprocess.TimeoutExpired):
            pass
        stop(self._process)
        self._output.close()
        with suppress(OSError):  # what it did not read any more
            self._input.close()


class Crew:
    """Workers of one visit; `use` says how many take part."""

    def __init__(self, environment: Environment, count: int, log: int) -> None:
        self._workers: list[Worker] = []
        try:
            for _ in range(count):
                self._workers.append(Worker(environment, log))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self, module: str, way: str, address: Address) -> None:
        """One after the other: some clients pick their ports as they come."""
        for index, worker in enumerate(self._workers):
            worker.send("open", module=module, way=way, address=address, index=index)
            worker.receive(START_S)

    # Any: the fields of JSON objects
    def all(self, use: int, do: str, **fields: Any) -> list[dict[str, Any]]:
        workers = self._workers[:use]
        for worker in workers:
            worker.send(do, **fields)
        return [worker.receive(REPLY_S) for worker in workers]

    def begin(self, use: int, seed: int, **fields: Any) -> None:
        workers = self._workers[:use]
        for index, worker in enumerate(workers):
            worker.send("begin", seed=seed + index, **fields)
        for worker in workers:
            worker.receive(REPLY_S)

    def sample(
        self, use: int, name: str, what: str, *, budget_s: float, least: int, most: int
    ) -> list[Taken]:
        """By worker; all of them start together."""
        start_at = time.monotonic() + START_DELAY_S
        answers = self.all(
            use,
            "sample",
            name=name,
            what=what,
            start_at=start_at,
            budget_s=budget_s,
            least=least,
            most=most,
        )
        return [Taken(list(answer["times"]), float(answer["wall_s"])) for answer in answers]

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []
