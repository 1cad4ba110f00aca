"""The GPU's kernels as plain C++, for tests of them and of what submits them."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from kvstored.tiers import kernels

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
