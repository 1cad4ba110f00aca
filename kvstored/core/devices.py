"""GPUs as the core sees them: their names, how their pools are shared, and which of them a rank's bytes belong to. Pure."""

from enum import IntEnum

STAND_IN = "host:"
"""Devices named so are host memory in place of a GPU's: `host:0`."""


class HandleKind(IntEnum):
    """How a pool is mapped by another process. Numbers as on the wire."""

    NOT_SHARED = 0
    CUDA_IPC = 1
    HOST_FILE = 2


def device_of(shard: int, devices: int) -> int:
    """Which of a host's GPUs the rank of this shard runs on: ranks are numbered through the hosts, GPU by GPU."""
    return shard % devices


def is_stand_in(name: str) -> bool:
    return name.startswith(STAND_IN) and name.removeprefix(STAND_IN).isdigit()
