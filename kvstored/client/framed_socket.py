"""Pieces over a bulk connection, each as it is or as a frame: a head of 8 bytes says which, and how long it is."""

from collections.abc import Sequence

import numpy as np

from kvstored.client.bulk_socket import BulkSocket, Runs
from kvstored.client.framing import Framed, Framing, Piece, head_of, size_of
from kvstored.wire.bulk import PIECE_HEAD


def send_framed(
    peer: BulkSocket,
    framing: Framing,
    digest: bytes,
    pieces: Sequence[Piece],
    ends_s: float,
) -> list[int]:
    """The checksums of their plain bytes. The next ones are encoded while one is sent."""
    with framing.encoding(digest, pieces) as made:
        return [_sent(peer, each, ends_s) for each in made]


def receive_framed(
    peer: BulkSocket, framing: Framing, targets: Sequence[Runs], ends_s: float
) -> list[int | None]:
    """The checksum of each piece as it lies at its target, None where its frame was damaged; Corrupt where nothing that follows can be understood.

    One is decoded while the next ones come. A frame is smaller than its piece, so nothing is allocated on the peer's word.
    """
    sums: list[int | None] = [None] * len(targets)
    head = bytearray(PIECE_HEAD.size)
    with framing.decoding() as decoding:
        for i, target in enumerate(targets):
            peer.receive_into(memoryview(head), ends_s)
            is_frame, size_bytes = head_of(head, size_of(target))
            if not is_frame:
                (sums[i],) = peer.receive_summed([target], ends_s)
                continue
            stored = np.empty(size_bytes, dtype=np.uint8)
            peer.receive_into(stored.data, ends_s)
            decoding.start(i, stored, target)
        decoding.settle()
        for i, found in decoding.sums.items():
            sums[i] = found
    return sums


def _sent(peer: BulkSocket, framed: Framed, ends_s: float) -> int:
    peer.send_pieces([(framed.head, *framed.views)], ends_s)
    return framed.checksum
