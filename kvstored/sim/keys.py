"""Keys of the blocks of a trace, and the bytes that a block of a key must hold.

A trace names blocks by chained ids, so a key is derived from the namespace's root and the id alone; equal ids are equal prefixes.
"""

from hashlib import sha256

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.core.types import GroupKind, GroupSpec, KeyBatch, NamespaceSpec
from kvstored.sim.traces import BlockIds, Trace

KEY_BYTES = 32
Content = NDArray[np.uint8]


def trace_namespace(trace: Trace, block_bytes: int) -> NamespaceSpec:
    """The namespace of a trace's blocks: one linear group of `block_bytes` a block."""
    return NamespaceSpec(
        model=f"replay-{trace.name.replace('@', '-')}",
        revision=f"{block_bytes}",
        dtype="u8",
        layout="replay",
        layout_version=1,
        block_tokens=trace.block_tokens,
        groups=(GroupSpec("kv", GroupKind.LINEAR, block_bytes),),
        sink_tokens=0,
    )


def block_key(root: bytes, block_id: int) -> bytes:
    """SHA-256 over the root, a label and the id as u64 LE: independent of process and platform."""
    return sha256(root + b"kvstored trace block" + block_id.to_bytes(8, "little")).digest()


class TraceKeys:
    """Keys and fingerprints by block id, each computed once; 48 bytes a distinct block plus its dict slot."""

    def __init__(self, root: bytes, seed: int) -> None:
        self._root = root
        self._seed = seed
        self._rows: dict[int, int] = {}
        self._keys: NDArray[np.uint8] = np.empty((1024, KEY_BYTES), dtype=np.uint8)
        self._fingerprints: NDArray[np.uint64] = np.empty((1024, 2), dtype=np.uint64)

    def batch(self, block_ids: BlockIds) -> KeyBatch:
        rows = self._rows_of(block_ids)
        packed = self._keys[rows].tobytes()
        return KeyBatch(packed, KEY_BYTES, self._fingerprints[rows])

    def keys(self, block_ids: BlockIds) -> list[bytes]:
        return [self._keys[row].tobytes() for row in self._rows_of(block_ids)]

    def _rows_of(self, block_ids: BlockIds) -> NDArray[np.int64]:
        ids = block_ids.tolist()
        known = self._rows
        rows = [known[i] if i in known else self._add(i) for i in ids]
        return np.array(rows, dtype=np.int64)

    def _add(self, block_id: int) -> int:
        row = len(self._rows)
        if row == len(self._keys):
            self._keys = np.resize(self._keys, (2 * row, KEY_BYTES))
            self._fingerprints = np.resize(self._fingerprints, (2 * row, 2))
        key = block_key(self._root, block_id)
        fingerprint = xxhash.xxh3_128_intdigest(key, seed=self._seed).to_bytes(16, "little")
        self._keys[row] = np.frombuffer(key, dtype=np.uint8)
        self._fingerprints[row] = np.frombuffer(fingerprint, dtype="<u8")
        self._rows[block_id] = row
        return row


class Contents:
    """Bytes that follow from a key, made and checked in one pass at memory speed.

    A fixed random stream (which zstd cannot shrink) is XORed with a word hashed from the key: any two blocks differ in every
    word, and so do two places of one block. Not thread-safe: it holds scratch space.
    """

    def __init__(self, block_bytes: int) -> None:
        words = -(-block_bytes // 8)
        stream = np.random.Generator(np.random.Philox(key=0x6B767374))
        self._bytes = block_bytes
        self._stream = stream.integers(0, 1 << 64, size=words, dtype=np.uint64)
        self._scratch = np.empty(words, dtype=np.uint64)

    def of(self, key: bytes) -> Content:
        """A new array with the bytes of this key."""
        words = np.bitwise_xor(self._stream, _word(key))
        return words.view(np.uint8)[: self._bytes]

    def is_right(self, key: bytes, content: Content) -> bool:
        """Whether these are the bytes of this key, all of them and nothing else."""
        if content.nbytes != self._bytes:
            return False
        np.bitwise_xor(self._stream, _word(key), out=self._scratch)
        expected = self._scratch.view(np.uint8)[: self._bytes]
        return bool(np.array_equal(content.reshape(-1).view(np.uint8), expected))


def _word(key: bytes) -> np.uint64:
    return np.uint64(xxhash.xxh3_64_intdigest(key))
