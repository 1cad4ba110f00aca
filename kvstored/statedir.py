"""Who owns a state directory: one keeper, by a lock that ends with its processes, and what it says of itself there.

Imports little: it is part of the keeper.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from kvstored.errors import ConfigError, StateMismatch

LOCK_NAME = "lock"
_ORPHANS_WAIT_S = 5.0
"""How long processes of a killed keeper may need to give their memory back and let go of the lock."""
_POLL_S = 0.02


class ChildStatus(NamedTuple):
    pid: int
    """0 while it waits to be started."""
    is_ready: bool
    starts: int


class KeeperStatus(NamedTuple):
    keeper_pid: int
    children: Mapping[str, ChildStatus]


class StateLock:
    """Held as long as the descriptor is open anywhere: the daemon inherits it, so a keeper's death alone frees nothing."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def take(cls, state_dir: str) -> "StateLock":
        """Makes the directory when needed. `StateMismatch` names the process that has it."""
        path = os.path.join(state_dir, LOCK_NAME)
        try:
            os.makedirs(state_dir, mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"state directory is not usable: {path=} {error=}") from error
        deadline_s = time.monotonic() + _ORPHANS_WAIT_S
        while not _locked(fd):
            pid = _parsed(_first_line(fd)).keeper_pid
            if _is_alive(pid) or time.monotonic() > deadline_s:
                os.close(fd)
                raise StateMismatch(
                    f"another kvstored runs on this state directory: {pid=} state_dir={state_dir}; stop it or choose another --state-dir"
                )
            time.sleep(_POLL_S)
        lock = cls(fd)
        lock.publish(KeeperStatus(os.getpid(), {}))
        return lock

    def publish(self, status: KeeperStatus) -> None:
        """A failure is ignored: a full disk must not end the keeper."""
        children = {name: child._asdict() for name, child in status.children.items()}
        line = json.dumps({"keeper_pid": status.keeper_pid, "children": children}).encode() + b"\n"
        try:
            os.pwrite(self.fd, line, 0)
            os.ftruncate(self.fd, len(line))
        except OSError:
            return

    def close(self) -> None:
        os.close(self.fd)


def read_status(state_dir: str) -> KeeperStatus | None:
    """What the running keeper last said; None when none runs."""
    try:
        fd = os.open(os.path.join(state_dir, LOCK_NAME), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if _locked(fd):
            return None
        status = _parsed(_first_line(fd))
        return status if _is_alive(status.keeper_pid) else None
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _first_line(fd: int) -> bytes:
    return os.pread(fd, 65536, 0).partition(b"\n")[0]


def _parsed(line: bytes) -> KeeperStatus:
    try:
        content = json.loads(line)
        children = {name: ChildStatus(**child) for name, child in content["children"].items()}
        return KeeperStatus(int(content["keeper_pid"]), children)
    except (ValueError, KeyError, TypeError, AttributeError):
        return KeeperStatus(0, {})


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
