"""The bulk channel: frames of the local channel over TCP, and the bytes of blocks between them (docs/api.md has the order).

The server speaks first: GREETING and its id, which the session's opening told. The client's first frame is KeepAlive with its session.
"""

import struct
from dataclasses import dataclass

GREETING = b"KVBULK1\n"
ID_BYTES = 16
DATA = 64
"""The method number of the frame that begins the bytes of a put; no payload."""
FRAMED = 65
"""As DATA, of a put whose pieces travel as frames."""
FRAMES_VERSION = 2
"""Of frames between hosts: bytes of DESIGN.md 4.8, never ones that refer to others. 1 had no sections of exponents: where the two ends are of different
versions, bytes travel as they are."""
PIECE_HEAD = struct.Struct("<Q")
"""Before each piece where pieces may be frames: bytes that follow << 1 | 1 where they are one."""
FRAMED_BYTES_MIN = 64 << 10
"""Of a piece that is worth a frame."""
HELLO_BYTES_MAX = 256
"""Payload of the first frame: nobody is known yet."""
OPEN_PUTS_MAX = 2
"""Reservations of one connection whose bytes have not come: one is sent while the next is made."""
HANDSHAKE_S = 5.0
STALL_S = 10.0
"""Without a byte in either direction, in the middle of a transfer."""
IDLE_S = 60.0
"""Between calls; a client makes another connection."""


@dataclass(frozen=True, slots=True)
class BulkAddress:
    """`id` is in the greeting; `certificate` is the SHA-256 of the server's certificate, empty without TLS."""

    host: str
    port: int
    id: bytes
    certificate: bytes = b""
