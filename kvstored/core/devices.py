"""GPUs as the core sees them: their names, how their pools are shared, and which of them a rank's bytes belong to. Pure."""

from enum import IntEnum

STAND_IN = "host:"
"""Devices named so are host memory in place of a GPU's: `host:0`."""
DEVICES_MAX = 64


class HandleKind(IntEnum):
    """How a pool is mapped by another process. Numbers as on the wire."""

    NOT_SHARED = 0
    CUDA_IPC = 1
    HOST_FILE = 2


def is_stand_in(name: str) -> bool:
    return name.startswith(STAND_IN) and name.removeprefix(STAND_IN).isdigit()


def is_device_name(name: str) -> bool:
    """An ordinal of CUDA, or a stand-in."""
    return is_stand_in(name) or (name.isascii() and name.isdigit() and int(name) < DEVICES_MAX)
