"""The committed generated code is what the committed proto gives."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("kvstored_pb2.py", "kvstored_pb2.pyi", "kvstored_pb2_grpc.py")


def test_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "scripts/generate-protos"), str(tmp_path)],
        check=True,
        timeout=60,
    )
    for name in NAMES:
        fresh = (tmp_path / "kvstored/pb" / name).read_text()
        assert fresh == (ROOT / "kvstored/pb" / name).read_text(), (
            f"run scripts/generate-protos: {name}"
        )
