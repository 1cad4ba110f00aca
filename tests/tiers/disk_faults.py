"""Disks that fail or die on purpose, for the tests of the disk tier."""

import errno
import os
from collections.abc import Sequence

from kvstored.tiers.slabs import SlabIo


class FailingIo(SlabIo):
    """Raises `errors[name]` in the call of that name, until it is taken out; moves at most `step_bytes` a call."""

    def __init__(self, step_bytes: int = 1 << 40) -> None:
        self.errors: dict[str, int] = {}
        self.calls: list[str] = []
        self.step_bytes = step_bytes

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass("preadv")
        return super().preadv(fd, self._first(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._pass("pwritev")
        return super().pwritev(fd, self._first(buffers), offset)

    def fdatasync(self, fd: int) -> None:
        self._pass("fdatasync")
        super().fdatasync(fd)

    def allocate(self, fd: int, size_bytes: int) -> None:
        self._pass("allocate")
        super().allocate(fd, size_bytes)

    def _pass(self, name: str) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise OSError(self.errors[name], os.strerror(self.errors[name]))

    def _first(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        if sum(map(len, buffers)) <= self.step_bytes:
            return buffers
        return [buffers[0][: self.step_bytes]]


class DyingIo(SlabIo):
    """Kills the process with -9 in the `fatal`th call, after half of what it should write is written."""

    def __init__(self, fatal: int) -> None:
        self._left = fatal

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._is_fatal():
            super().pwritev(fd, [buffers[0][: len(buffers[0]) // 8192 * 4096]], offset)
            os.kill(os.getpid(), 9)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if self._is_fatal():
            os.kill(os.getpid(), 9)
        super().fdatasync(fd)

    def _is_fatal(self) -> bool:
        self._left -= 1
        return self._left < 0


ENOSPC, EIO = errno.ENOSPC, errno.EIO
