"""A process that must not outlive the keeper that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_keeper(keeper_pid: int) -> None:
    """The kernel kills this process when its parent, the keeper, ends, whatever either is doing; call it first of all.

    By SIGKILL: the lock that this process inherited must be free for the next keeper at once, and every tier stands a crash.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != keeper_pid:  # it died before the call
        sys.exit("the keeper of this process is gone")
