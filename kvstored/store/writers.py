"""Watches the processes that may write to shared memory: space of a closed session is kept aside until its writer is dead.

A pidfd names a process without the danger that its number was given to another one. Where the peer's process is not visible (other
PID namespace, no pidfd) nothing is watched, and the catalog's quarantine timer decides.
"""

import asyncio
import os
import select
from collections.abc import Callable


class Writers:
    """`died(pid)` is called on the loop when a watched process ended; afterwards it is no longer watched."""

    def __init__(self, died: Callable[[int], None]) -> None:
        self._died = died
        self._pidfds: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pidfds)

    def watch(self, pid: int) -> bool:
        """Watch `pid` from now on, once however often it is called; False when it cannot be seen."""
        if pid in self._pidfds:
            return True
        if pid <= 0:
            return False
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # ended already, or of another PID namespace: the caller cannot tell either
            return False
        self._pidfds[pid] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._ended, pid)
        return True

    def is_dead(self, pid: int) -> bool:
        """Whether a watched process is known to have ended; False for an unwatched one."""
        pidfd = self._pidfds.get(pid)
        if pidfd is None:
            return False
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def is_gone(self, pid: int) -> bool:
        """Whether no process has this number now."""
        try:
            os.close(os.pidfd_open(pid))
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def watched(self) -> set[int]:
        return set(self._pidfds)

    def forget(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def close(self) -> None:
        for pid in tuple(self._pidfds):
            self.forget(pid)

    def _ended(self, pid: int) -> None:
        self.forget(pid)
        self._died(pid)
