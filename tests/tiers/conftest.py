"""The GPU's kernels as plain C++, for tests of them and of what submits them; two pools, of the stand-in and of a CUDA that is not there."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.tiers import kernels
from kvstored.tiers.device import open_device
from kvstored.tiers.hbm import Hbm
from tests.tiers.fake_cupy import FakeRuntime

POOL_BYTES = 16 << 20

SOURCE = Path(kernels.__file__).with_name("kernels.cu")
LAUNCH = Path(__file__).with_name("host_kernels")


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler here: the kernels cannot be run on the host")
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-x", "c++"]
    includes = [f"-I{LAUNCH}", f"-I{SOURCE.parent}"]
    subprocess.run(
        [compiler, *flags, *includes, str(LAUNCH / "launch.cpp"), "-o", str(library)],
        check=True,
        timeout=50,
    )
    return ctypes.CDLL(str(library))


@pytest.fixture(params=["stand-in", "cuda"])
def hbm(request: pytest.FixtureRequest, runtime: FakeRuntime) -> Iterator[Hbm]:
    """`runtime`: the fake CuPy of the test's own module."""
    names = ["host:0", "host:1"] if request.param == "stand-in" else ["0", "1"]
    made = Hbm(names, POOL_BYTES, open_device)
    made.grow()
    made.grow()
    yield made
    made.close()
