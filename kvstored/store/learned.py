"""What the eviction policy learned, kept over restarts in one small file beside the namespaces.

The file is a head (magic, version, the policy's name, length and xxh3-64 of the rest) and what the policy dumped. Anything that is not
exactly that is a cold start: the policy then learns anew within some hundred requests.
"""

import struct
from pathlib import Path

import xxhash

from kvstored.core.policies.base import Policy
from kvstored.errors import InvalidArgument, StateMismatch
from kvstored.store.registry import replace_file

FILE_NAME = "policy.state"
BYTES_MAX = 64 << 20
_HEAD = struct.Struct("<4sHH16sQQ")
_MAGIC, _VERSION = b"KVPS", 1


def save(state_dir: Path, policy: str, dumped: bytes) -> None:
    """Blocks; whole or not at all."""
    checksum = xxhash.xxh3_64_intdigest(dumped)
    head = _HEAD.pack(_MAGIC, _VERSION, 0, policy.encode(), len(dumped), checksum)
    replace_file(state_dir / FILE_NAME, head + dumped)


def restore(state_dir: Path, policy: Policy, now_s: float) -> str:
    """Let the policy go on from the file; why it starts cold, empty where it does not or where nothing was kept."""
    path = state_dir / FILE_NAME
    try:
        with path.open("rb") as file:
            content = file.read(BYTES_MAX)
        policy.load(_dumped(content, policy.name), now_s)
    except FileNotFoundError:
        return ""
    except (OSError, StateMismatch, InvalidArgument) as error:
        return f"{error}"
    return ""


def _dumped(content: bytes, policy: str) -> bytes:
    if len(content) < _HEAD.size:
        raise StateMismatch(f"not a policy's state: bytes={len(content)}")
    magic, version, reserved, name, length, checksum = _HEAD.unpack_from(content)
    dumped = content[_HEAD.size :]
    if (magic, version, reserved) != (_MAGIC, _VERSION, 0):
        raise StateMismatch(f"not a policy's state of this version: version={version}")
    if name.rstrip(b"\0") != policy.encode():
        raise StateMismatch(f"the state of another policy: policy={name.rstrip(bytes(1))!r}")
    if len(dumped) != length or xxhash.xxh3_64_intdigest(dumped) != checksum:
        raise StateMismatch(f"a policy's state is damaged: bytes={len(dumped)} expected={length}")
    return dumped
