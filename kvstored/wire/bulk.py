"""The bulk channel: frames of the local channel over TCP, and the bytes of blocks between them (docs/api.md has the order).

The server speaks first: GREETING and its id, which the session's opening told. The client's first frame is KeepAlive with its session.
"""

from dataclasses import dataclass

GREETING = b"KVBULK1\n"
ID_BYTES = 16
DATA = 64
"""The method number of the frame that begins the bytes of a put; no payload."""
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
