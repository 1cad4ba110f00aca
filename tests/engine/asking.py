"""An engine in a process of its own, as engines are: questions come as lines of JSON, answers go back so."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.crash.served import ROOT, environment


@dataclass(frozen=True)
class Told:
    text: str
    ids: list[int]
    prompt_ids: list[int]
    tokens: int
    by_tier: dict[str, int]
    trouble: str
    ttft_s: float
    kv: str
    """SHA-256 of the KV of the prompt."""

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


class Asked:
    def __init__(self, address: str) -> None:
        # One thread: on a busy machine OpenBLAS is many times slower with more.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.asking", address],
            env={**environment(), "OPENBLAS_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, prompt: str, *, with_daemon: bool, tokens_max: int = 8) -> Told:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        question = {"prompt": prompt, "with_daemon": with_daemon, "tokens_max": tokens_max}
        stdin.write(json.dumps(question) + "\n")
        stdin.flush()
        return Told(**json.loads(stdout.readline()))

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


def _serve(address: str) -> None:
    from examples.smollm2.engine import Engine
    from examples.smollm2.model import Model
    from examples.smollm2.weights import model_file
    from kvstored.client import Client

    model = Model(model_file())
    alone, helped = Engine(model), Engine(model, Client(address, timeout_s=10))
    for line in sys.stdin:
        question = json.loads(line)
        engine = helped if question["with_daemon"] else alone
        answer = engine.generate(question["prompt"], question["tokens_max"])
        prompt_kv = answer.kv[:, :, :, : answer.prompt_tokens]
        told = Told(
            text=answer.text,
            ids=list(answer.ids),
            prompt_ids=model.tokenizer.encode(question["prompt"]),
            tokens=answer.loaded.tokens,
            by_tier=answer.loaded.by_tier,
            trouble=answer.loaded.trouble,
            ttft_s=answer.ttft_s,
            kv=hashlib.sha256(prompt_kv.tobytes()).hexdigest(),
        )
        os.write(1, json.dumps(vars(told)).encode() + b"\n")


if __name__ == "__main__":
    _serve(sys.argv[1])
