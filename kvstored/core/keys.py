"""Block keys and their fingerprints: deterministic, equal on every machine and in every process.

The byte layouts hashed here are tables in docs/identity.md and golden vectors in the tests;
changing one orphans every stored block. Keys made here are 32 bytes; engines that hash by
themselves pass 8 to 64 opaque bytes instead.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstored.core.types import (
    BATCH_KEYS_MAX,
    KEY_BYTES_MAX,
    KEY_BYTES_MIN,
    Fingerprints,
    KeyBatch,
)
from kvstored.errors import InvalidArgument

DIGEST_BYTES = 32
CONTENT_KEY_BYTES = 16
EXTRA_KEYS_MAX = 64
EXTRA_KEY_BYTES_MAX = 4096

# One tag a kind of hash, so that no input of one kind can be read as an input of another. The last
# byte is the version.
ROOT_TAG = b"kvs.rt\x00\x01"
BLOCK_TAG = b"kvs.bk\x00\x01"
MIX_TAG = b"kvs.mx\x00\x01"

Tokens = Sequence[int] | NDArray[np.integer]


def root(digest: bytes, extra_keys: Sequence[bytes] = ()) -> bytes:
    """The parent of a sequence's first block: the namespace and whatever else makes the sequence
    its own.

    Extra keys are the cache salt, LoRA id, multimodal hashes; their order and number matter, an
    empty one is not none.
    """
    _check_bytes("digest", digest)
    if len(extra_keys) > EXTRA_KEYS_MAX:
        raise InvalidArgument(f"too many extra keys count={len(extra_keys)} max={EXTRA_KEYS_MAX}")
    hashed = hashlib.sha256(ROOT_TAG + digest + len(extra_keys).to_bytes(4, "little"))
    for extra_key in extra_keys:
        if len(extra_key) > EXTRA_KEY_BYTES_MAX:
            raise InvalidArgument(
                f"extra key is too long bytes={len(extra_key)} max={EXTRA_KEY_BYTES_MAX}"
            )
        hashed.update(len(extra_key).to_bytes(4, "little") + extra_key)
    return hashed.digest()


def chain(parent: bytes, tokens: Tokens) -> bytes:
    """The key of one block: its parent (the root or the block before it) and exactly its tokens."""
    _check_bytes("parent", parent)
    packed = _packed_tokens(tokens)
    if len(packed) == 0:
        raise InvalidArgument("a block has at least one token tokens=0")
    return _chained(parent, packed.data)


def block_keys(root_key: bytes, tokens: Tokens, block_tokens: int) -> list[bytes]:
    """Keys of all blocks of a sequence, the last of which may be partial; about a microsecond a KiB
    of tokens.
    """
    _check_bytes("root", root_key)
    if block_tokens < 1:
        raise InvalidArgument(f"block_tokens must be at least 1 block_tokens={block_tokens}")
    packed = _packed_tokens(tokens).data
    keys, parent = [], root_key
    for start in range(0, len(packed), block_tokens):
        parent = _chained(parent, packed[start : start + block_tokens])
        keys.append(parent)
    return keys


def content_keys(
    root_key: bytes, tokens: Tokens, block_tokens: int, first_token: int = 0
) -> list[bytes]:
    """What each block of a sequence contains, whatever is before it: its own tokens, its position, and the root. A collision costs
    space, so that a fast hash does. `first_token`: position of the first of these tokens.
    """
    _check_bytes("root", root_key)
    packed = _packed_tokens(tokens)
    digest, starts = xxhash.xxh3_128_digest, range(0, len(packed), block_tokens)
    raw, width = packed.tobytes(), packed.itemsize
    return [
        digest(root_key + raw[at * width : (at + block_tokens) * width], first_token + at)
        for at in starts
    ]


def content_fingerprints(packed: bytes, count: int, seed: int) -> NDArray[np.uint32]:
    """Of packed content keys, within the namespace whose seed this is; 0 for a key of zeros, which is none. 32 bits do: a collision is
    seen when the bytes are compared.
    """
    if len(packed) != count * CONTENT_KEY_BYTES:
        raise InvalidArgument(
            f"a content key of {CONTENT_KEY_BYTES} bytes for each key bytes={len(packed)} keys={count}"
        )
    batch = key_batch(packed, CONTENT_KEY_BYTES, seed).fingerprints[:, 0].astype(np.uint32)
    is_told = np.frombuffer(packed, dtype=np.uint8).reshape(count, -1).any(axis=1)
    told: NDArray[np.uint32] = np.where(is_told, batch | np.uint32(1), np.uint32(0))
    return told


def mix(root_key: bytes, key: bytes) -> bytes:
    """An engine's opaque key within a root: equal hashes under another salt or LoRA become other
    keys.
    """
    _check_bytes("root", root_key)
    _check_key_bytes(len(key))
    return hashlib.sha256(MIX_TAG + root_key + key).digest()


def mix_batch(root_key: bytes, packed: bytes, key_bytes: int) -> bytes:
    """`mix` of each key of a packed batch, packed again at 32 bytes a key."""
    count = _checked_count(packed, key_bytes)
    keys = (packed[i * key_bytes : (i + 1) * key_bytes] for i in range(count))
    return b"".join(mix(root_key, key) for key in keys)


def fingerprint(key: bytes, seed: int) -> tuple[int, int]:
    """(lo, hi) of the key's 128 bits within the namespace whose seed this is."""
    value = xxhash.xxh3_128_intdigest(key, seed)
    return value & 0xFFFF_FFFF_FFFF_FFFF, value >> 64


def checked_fingerprint(key: bytes, seed: int) -> tuple[int, int]:
    """The same; raises InvalidArgument for a key of a length that no key may have."""
    _check_key_bytes(len(key))
    return fingerprint(key, seed)


def key_batch(packed: bytes, key_bytes: int, seed: int) -> KeyBatch:
    """Keys of one call with their fingerprints; raises InvalidArgument for any shape a call may not
    have.
    """
    count = _checked_count(packed, key_bytes)
    if count == 1:
        alone = np.array([fingerprint(packed, seed)], dtype=np.uint64)
        return KeyBatch(packed=packed, key_bytes=key_bytes, fingerprints=alone)
    digest, ends = xxhash.xxh3_128_digest, range(key_bytes, count * key_bytes + 1, key_bytes)
    digests = b"".join([digest(packed[end - key_bytes : end], seed) for end in ends])
    # xxhash writes its canonical form, big-endian and high half first; a fingerprint is [lo, hi].
    high_low = np.frombuffer(digests, dtype=">u8").reshape(count, 2)
    fingerprints: Fingerprints = np.ascontiguousarray(high_low[:, ::-1], dtype=np.uint64)
    return KeyBatch(packed=packed, key_bytes=key_bytes, fingerprints=fingerprints)


def _chained(parent: bytes, packed_tokens: memoryview) -> bytes:
    hashed = hashlib.sha256(BLOCK_TAG + parent)
    hashed.update(packed_tokens)
    return hashed.digest()


def _packed_tokens(tokens: Tokens) -> NDArray[np.uint32]:
    """Token ids as little-endian u32; anything that would not survive the cast is refused."""
    try:
        ids = np.asarray(tokens if len(tokens) else (), dtype=None if len(tokens) else np.int64)
    except OverflowError as error:
        raise InvalidArgument("token ids must fit 32 bits unsigned") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            f"token ids must be one row of integers dimensions={ids.ndim} dtype={ids.dtype}"
        )
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > 0xFFFF_FFFF):
        raise InvalidArgument(
            f"token ids must fit 32 bits unsigned min={int(ids.min())} max={int(ids.max())}"
        )
    return np.ascontiguousarray(ids, dtype="<u4")


def _checked_count(packed: bytes, key_bytes: int) -> int:
    _check_key_bytes(key_bytes)
    count, rest = divmod(len(packed), key_bytes)
    if rest:
        raise InvalidArgument(
            f"packed keys are not a whole number of keys bytes={len(packed)} key_bytes={key_bytes}"
        )
    if count > BATCH_KEYS_MAX:
        raise InvalidArgument(f"too many keys in one call keys={count} max={BATCH_KEYS_MAX}")
    return count


def _check_key_bytes(key_bytes: int) -> None:
    if not KEY_BYTES_MIN <= key_bytes <= KEY_BYTES_MAX:
        raise InvalidArgument(
            f"a key has {KEY_BYTES_MIN} to {KEY_BYTES_MAX} bytes key_bytes={key_bytes}"
        )


def _check_bytes(name: str, value: bytes) -> None:
    if len(value) != DIGEST_BYTES:
        raise InvalidArgument(f"{name} must have {DIGEST_BYTES} bytes {name}_bytes={len(value)}")
