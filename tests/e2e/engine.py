"""How tests talk to an engine in a process of its own."""

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.crash.served import ROOT

ENGINES = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstored-engines"
MODEL = Path(os.environ.get("E2E_MODELS") or ENGINES / "models") / "smollm2-hf"


@dataclass(frozen=True, slots=True)
class Said:
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    cached: int
    seconds: float

    @staticmethod
    def of(answer: dict[str, Any]) -> "Said":
        return Said(
            tuple(answer["tokens"]),
            answer["text"],
            tuple(answer["logprobs"]),
            answer["cached"],
            answer["seconds"],
        )


class Engine:
    """Ended by leaving it. `connector`: its extra configuration; None runs without."""

    def __init__(
        self, folder: Path, connector: dict[str, Any] | None, model: Path = MODEL, **engine: Any
    ) -> None:
        self.log = folder / f"engine-{len(list(folder.glob('engine-*')))}"
        told = {"model": str(model), "connector": connector, "engine": engine}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.vllm_process", json.dumps(told)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._threads = ThreadPoolExecutor(1)
        try:
            assert self._answer() == {"ready": True}
        except BaseException:
            self._end()
            raise

    def generate(
        self, prompt: list[int], tokens: int, salt: str = "", adapter: Path | None = None
    ) -> Said:
        asked = {"prompt": prompt, "tokens": tokens, "salt": salt, "adapter": str(adapter or "")}
        return Said.of(self._ask(do="generate", **asked))

    def generate_all(self, prompts: list[list[int]], tokens: int) -> list[Said]:
        """At once."""
        return [
            Said.of(each) for each in self._ask(do="generate_all", prompts=prompts, tokens=tokens)
        ]

    def generating(self, prompt: list[int], tokens: int) -> Future[Said]:
        """Begun; what it says later."""
        return self._threads.submit(self.generate, prompt, tokens)

    def metrics(self) -> dict[str, float]:
        return dict(self._ask(do="metrics"))

    def external_hits(self) -> float:
        """vLLM's own count of tokens that came from outside."""
        return self.metrics()["vllm:external_prefix_cache_hits"]

    def forget(self) -> None:
        """Its own prefix cache."""
        assert self._ask(do="reset"), "vLLM did not reset its prefix cache"

    def tokens(self, text: str) -> list[int]:
        return list(self._ask(do="tokens", text=text))

    def said(self) -> str:
        """What it logged."""
        return self.log.read_text(errors="replace")

    def _ask(self, **asked: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the engine ended: {self.said()[-4000:]}"
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        if error is not None:
            error.add_note(self.said()[-3000:])

    def _end(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()
        self._threads.shutdown()
