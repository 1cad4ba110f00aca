"""Whether the daemon behind a gRPC address runs on this host, so that bytes can go through shared memory instead."""

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """The same for every process and container of one boot of one host; empty where the kernel does not tell."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def reachable_socket(host: str, socket: str) -> str | None:
    """The daemon's local socket, if it is on this host and this process can see and use it."""
    if not host or host != host_id() or not os.access(socket, os.R_OK | os.W_OK):
        return None
    return socket
