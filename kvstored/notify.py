"""systemd's service protocol, both ends: state datagrams, descriptors to keep, descriptors handed down at a start.

Used by the keeper towards systemd, by the daemon and the front towards the keeper. Imports little: the keeper stays small.
"""

import array
import os
import socket
from collections.abc import Iterable, Mapping, MutableMapping
from typing import NamedTuple

LISTEN_FDS_START = 3
MESSAGE_BYTES_MAX = 8192
NAME_MAX = 255
"""Characters of a descriptor's name that systemd takes."""

_SEND_TIMEOUT_S = 2.0
_CREDENTIALS_BYTES = 12
"""pid, uid, gid as 32-bit numbers."""


class Message(NamedTuple):
    """A datagram as received; the receiver owns the descriptors."""

    pid: int
    """Of the sender, from the kernel; 0 when unknown."""
    fields: list[tuple[str, str]]
    fds: list[int]


class Notifier:
    """Tells the service manager, or nobody when there is none; a manager that does not listen is not this process's problem."""

    def __init__(self, address: str | None) -> None:
        self._address = address.replace("@", "\0", 1) if address and address[0] == "@" else address

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> "Notifier":
        """Takes NOTIFY_SOCKET away, so that no child talks to this process's manager by accident."""
        return cls(environ.pop("NOTIFY_SOCKET", None))

    def ready(self, status: str = "") -> None:
        self.send([("READY", "1"), *([("STATUS", status)] if status else [])])

    def status(self, text: str) -> None:
        self.send([("STATUS", text)])

    def stopping(self) -> None:
        self.send([("STOPPING", "1")])

    def store(self, name: str, fd: int) -> bool:
        """Has the manager keep a duplicate of `fd` under `name` for the next start; the caller keeps its own."""
        assert is_name(name), name
        return self.send([("FDSTORE", "1"), ("FDNAME", name), ("FDPOLL", "0")], [fd])

    def remove(self, name: str) -> bool:
        """Has the manager close what it keeps under `name`."""
        return self.send([("FDSTOREREMOVE", "1"), ("FDNAME", name)])

    def send(self, fields: Iterable[tuple[str, str]], fds: Iterable[int] = ()) -> bool:
        """False when nobody heard it."""
        if self._address is None:
            return False
        text = "\n".join(f"{name}={value.replace(chr(10), ' ')}" for name, value in fields)
        rights = array.array("i", fds)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_TIMEOUT_S)
                sender.sendmsg([text.encode()], ancillary, 0, self._address)
        except OSError:
            return False
        return True


class Listener:
    """The manager's end: an abstract socket whose messages carry the sender's credentials, so no path, no mode, no clean-up."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the kernel chooses an unused abstract name
        name = self._socket.getsockname()
        assert isinstance(name, bytes)
        self.address = "@" + name[1:].decode()

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> Message | None:
        """None when nothing waits."""
        room = socket.CMSG_SPACE(_CREDENTIALS_BYTES) + socket.CMSG_SPACE(4 * 253)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                MESSAGE_BYTES_MAX, room, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        pid, fds = 0, array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid = int.from_bytes(content[:4], "little")
        is_whole = not flags & socket.MSG_TRUNC
        return Message(pid, _fields(data) if is_whole else [], list(fds))

    def close(self) -> None:
        self._socket.close()


def is_name(name: str) -> bool:
    """Whether a descriptor may be called so."""
    return 0 < len(name) <= NAME_MAX and name.isprintable() and ":" not in name


def listen_fds(environ: MutableMapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """The (name, descriptor) pairs handed to this process; the caller owns them.

    Takes the variables away and marks the descriptors close-on-exec: a grandchild gets neither. Meant for another process: empty.
    """
    count, pid = environ.pop("LISTEN_FDS", ""), environ.pop("LISTEN_PID", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if not count.isdigit() or pid != str(os.getpid()):
        return []
    fds = range(LISTEN_FDS_START, LISTEN_FDS_START + int(count))
    for fd in fds:
        os.set_inheritable(fd, False)
    named = names if len(names) == len(fds) else ["unknown"] * len(fds)
    return list(zip(named, fds, strict=True))


def handed_down(environ: Mapping[str, str], names: Iterable[str], pid: int) -> dict[str, str]:
    """`environ` for a child `pid` that has descriptors of these names from LISTEN_FDS_START on."""
    listed = list(names)
    kept = {name: value for name, value in environ.items() if not name.startswith("LISTEN_")}
    if not listed:
        return kept
    return {
        **kept,
        "LISTEN_FDS": str(len(listed)),
        "LISTEN_PID": str(pid),
        "LISTEN_FDNAMES": ":".join(listed),
    }


def _fields(data: bytes) -> list[tuple[str, str]]:
    lines = data.decode(errors="replace").split("\n")
    return [
        (name, value)
        for name, equals, value in (line.partition("=") for line in lines)
        if name and equals
    ]
