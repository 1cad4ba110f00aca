"""Unix sockets of the local channel: made with the right mode, and who is at the other end. Knows no frames."""

import errno
import os
import socket
import stat
import struct
from pathlib import Path

from kvstored.errors import ConfigError
from kvstored.wire.frames import SOCKET_PATH_BYTES_MAX


def listen(path: Path, mode: int) -> socket.socket:
    """A listener in place of whatever dead socket lies there; ConfigError where it cannot be made, or somebody serves there."""
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the socket's path is too long bytes={len(os.fsencode(path))} "
            f"max={SOCKET_PATH_BYTES_MAX} path={path}; set `socket` to a shorter one"
        )
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"something that is no socket lies at path={path}")
    refuse_served(path, "socket")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Linux takes the file's mode from the socket: it is never open wider, not even between bind and chmod.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(os.fspath(path))
        path.chmod(mode)
        listener.listen(1024)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"the socket cannot be made path={path}: {error}") from error
    return listener


def path_of(listen: str) -> Path:
    """Of an address unix:///path or unix:path, as gRPC takes them."""
    return Path(listen.removeprefix("unix://").removeprefix("unix:"))


def refuse_served(path: Path, setting: str) -> None:
    """ConfigError where another process listens. Who binds to a path removes what lies there first: the socket of a daemon with another state
    directory would go, and that daemon would be out of reach for good.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:  # its queue is full, or it is another user's
            reason = error.strerror or str(error)
        else:
            reason = os.strerror(errno.EADDRINUSE)
    flag = f"--{setting.replace('_', '-')}"
    raise ConfigError(
        f"another process serves there: {setting}={path} error={reason}; stop it, or give another {flag}"
    )


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the peer, from the kernel."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", packed)
    return pid, uid, gid
