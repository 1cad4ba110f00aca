"""Environments, models and daemons of the end-to-end tests."""

import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.smollm2.weights import model_file
from tests.crash.served import Served
from tests.e2e.environments import cache_folder, engine_python

TORCH = "torch==2.13.0"


@pytest.fixture(scope="session")
def transformers_python() -> Path:
    """Of a CPU; where PyPI's torch brings CUDA, an index of the site's own may say otherwise."""
    needs = ("numpy>=2.0", "xxhash>=3.5", "protobuf>=5.27")
    packages = ("transformers==5.24.0", "gguf", "sentencepiece", "accelerate")
    return engine_python("transformers", (TORCH,), packages, needs)


@pytest.fixture(scope="session")
def smollm2(transformers_python: Path) -> Path:
    """SmolLM2-135M as a folder in bfloat16, converted once from the file of the numpy engine."""
    folder = cache_folder() / "models" / "smollm2-hf"
    if not folder.exists():
        file = model_file()
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            command = [transformers_python, "-m", "tests.e2e.convert"]
            subprocess.run([*command, file.parent, file.name, made], check=True, timeout=900)
            Path(made).rename(folder)
            Path(made).mkdir()  # which the context removes
    return folder


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Makes daemons, each in a folder of its own; all end with the test."""
    with ExitStack() as stack:

        def make(**sizes: str) -> Served:
            # Not tmp_path: a socket's path has at most 107 bytes.
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvs"))
            served = Served(Path(folder), **sizes)
            stack.callback(served.end)
            return served

        yield make
