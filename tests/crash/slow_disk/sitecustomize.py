"""In a daemon's process: while the file named by SLOW_DISK_FLAG exists, reading blocks from the disk takes seconds."""

import os
import time
from pathlib import Path

_SECONDS = 3.0
_flag = Path(os.environ["SLOW_DISK_FLAG"])
_preadv = os.preadv


def _slow(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
    if _flag.exists():
        time.sleep(_SECONDS)
    return _preadv(fd, buffers, offset, flags)


os.preadv = _slow
