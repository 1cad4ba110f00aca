"""Frames of the local channel: a 12-byte header, then a protobuf payload.

A request carries its deadline where an answer carries its status. Calls of one connection are
answered in order.
"""

import struct

from kvstored.errors import InvalidArgument

HEADER = struct.Struct("<IHHI")
"""Payload bytes, method number, status (answers) or deadline in hundredths of a second, 0 none
(requests), call id.
"""
HEADER_BYTES = HEADER.size
PAYLOAD_BYTES_MAX = 8 << 20
DEADLINE_S_MAX = 655.0
SOCKET_PATH_BYTES_MAX = 107
"""What fits into sockaddr_un."""


def frame(method: int, status: int, call: int, payload: bytes) -> bytes:
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidArgument(
            f"a message is too large bytes={len(payload)} max={PAYLOAD_BYTES_MAX}; send fewer keys"
        )
    return HEADER.pack(len(payload), method, status, call) + payload


def deadline_field(timeout_s: float) -> int:
    """`timeout_s` as the header's field: at least one hundredth, at most DEADLINE_S_MAX."""
    return max(1, int(min(timeout_s, DEADLINE_S_MAX) * 100))
