"""Keys are golden, independent of process and platform, and differ wherever content may differ."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstored.core.keys import (
    block_keys,
    chain,
    content_fingerprints,
    content_keys,
    fingerprint,
    key_batch,
    mix,
    mix_batch,
    root,
)
from kvstored.core.namespace import digest, seed
from kvstored.errors import InvalidArgument
from tests.core.specs import PLAIN
from tests.core.test_namespace import GOLDEN_HYBRID

DIGEST = bytes(range(32))
GOLDEN_ROOT = "001672b302f7e69e4261f57029327909f296d11805dd1508456c93f40ce0010d"
GOLDEN_SALTED_ROOT = "4bf7ed0aefcf64c416a45b21aeaf738504c43cf2b952150d304c7fd64c39b88f"
GOLDEN_KEYS = (
    "3d0ad859bb3daaf163f165941f0d0a5377e9ac44e1a2be5e51f4bc1a0b0140b6",
    "b3997fe53d7592d49cedcba94f7ef79af7fbfa5ff27c02b4c4b22c1dc50bac75",
    "ba15d8fc3085d49f01b418a256f7dd5165a0d77822772546cf4e48252f32a0bb",
)
GOLDEN_CONTENT_KEYS = (
    "969674e344e705a14f8bb080bc54cb8b",
    "fb1b5cfd88582e01681d73f053294e5c",
    "f54caffe1a3e74938224db8296f91649",
)
GOLDEN_CONTENT_FINGERPRINT = 0xBAA74E93
GOLDEN_MIX = "7c233fe3ae15bb7861e9081d8b06360c9133e8cb4efbd86b12547ade5d75fcd3"
GOLDEN_FINGERPRINT = (0x47DF0A4C8CC3AF9E, 0xFEAE084C53CBBB2A)
TOKENS = [1, 2, 3, 4, 0, 0xFFFF_FFFF, 7, 8, 9]


def test_golden_content_keys() -> None:
    tokens = [1, 2, 3, 4, 0, 4294967295, 7, 8, 9]
    made = content_keys(root(DIGEST), tokens, 4)
    assert [key.hex() for key in made] == list(GOLDEN_CONTENT_KEYS)
    assert content_keys(root(DIGEST), tokens[4:8], 4, 4) == made[1:2], "from any block on"
    assert content_fingerprints(made[0], 1, 42).tolist() == [GOLDEN_CONTENT_FINGERPRINT]


def test_content_keys_differ_by_position_root_and_tokens_and_by_nothing_before() -> None:
    tokens = [9, 9, 9, 9, 9, 9, 9, 9]
    first, second = content_keys(root(DIGEST), tokens, 4)
    assert first != second
    assert content_keys(root(DIGEST), [1, 2, 3, 4, 9, 9, 9, 9], 4)[1] == second
    assert content_keys(root(DIGEST, [b"salt"]), tokens, 4)[0] != first
    assert content_keys(root(DIGEST), [9, 9, 9, 8], 4)[0] != first


def test_zeros_are_no_content_key_and_a_wrong_number_is_refused() -> None:
    assert content_fingerprints(bytes(32), 2, 42).tolist() == [0, 0]
    with pytest.raises(InvalidArgument, match="bytes=31 keys=2"):
        content_fingerprints(bytes(31), 2, 42)


def test_golden_root() -> None:
    assert root(DIGEST).hex() == GOLDEN_ROOT
    assert root(DIGEST, [b"salt", b"lora-7"]).hex() == GOLDEN_SALTED_ROOT


def test_golden_keys_of_two_full_blocks_and_a_partial_one() -> None:
    assert [key.hex() for key in block_keys(root(DIGEST), TOKENS, 4)] == list(GOLDEN_KEYS)


def test_golden_mix_and_fingerprint() -> None:
    assert mix(root(DIGEST, [b"salt"]), bytes(8)).hex() == GOLDEN_MIX
    assert fingerprint(bytes.fromhex(GOLDEN_KEYS[0]), 42) == GOLDEN_FINGERPRINT


def test_layouts_are_those_of_the_documented_tables() -> None:
    extra = b"\x02\0\0\0" + b"\x04\0\0\0salt" + b"\x06\0\0\0lora-7"
    salted = hashlib.sha256(b"kvs.rt\x00\x01" + DIGEST + extra).digest()
    assert root(DIGEST, [b"salt", b"lora-7"]) == salted
    block = hashlib.sha256(b"kvs.bk\x00\x01" + salted + b"\x01\0\0\0" + b"\xff\xff\xff\xff")
    assert chain(salted, [1, 0xFFFF_FFFF]) == block.digest()
    mixed = hashlib.sha256(b"kvs.mx\x00\x01" + salted + b"engine-hash")
    assert mix(salted, b"engine-hash") == mixed.digest()


@pytest.mark.parametrize("hash_seed", ["0", "1", "4242"])
def test_keys_do_not_depend_on_the_process_or_its_hash_seed(hash_seed: str) -> None:
    program = (
        "from kvstored.core.keys import *; from kvstored.core.namespace import digest;"
        "from tests.core.specs import HYBRID;"
        f"print([k.hex() for k in block_keys(root(bytes(range(32))), {TOKENS}, 4)]);"
        "print(digest(HYBRID).hex())"
    )
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join([".", *sys.path])}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split("\n")[:2] == [str(list(GOLDEN_KEYS)), GOLDEN_HYBRID]


@given(tokens=st.lists(st.integers(0, 0xFFFF_FFFF), max_size=70), block_tokens=st.integers(1, 20))
def test_block_keys_chain_block_by_block_and_share_prefixes(
    tokens: list[int], block_tokens: int
) -> None:
    start = root(DIGEST)
    keys = block_keys(start, tokens, block_tokens)
    parent, expected = start, []
    for i in range(0, len(tokens), block_tokens):
        parent = chain(parent, tokens[i : i + block_tokens])
        expected.append(parent)
    assert keys == expected
    full = len(tokens) // block_tokens
    assert block_keys(start, [*tokens, 5], block_tokens)[:full] == keys[:full]


def test_a_partial_block_has_a_key_of_its_own() -> None:
    keys = {block_keys(root(DIGEST), TOKENS[:n], 4)[-1] for n in range(1, 10)}
    assert len(keys) == 9


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32, np.dtype(">u4"), np.uint16])
def test_arrays_of_any_integer_type_order_and_stride_give_the_keys_of_the_list(
    dtype: type[np.integer],
) -> None:
    ids = [1, 2, 3, 40_000 % 32_768, 5]
    strided = np.asarray([ids, ids], dtype=dtype).T[:, 0]
    assert block_keys(root(DIGEST), strided, 2) == block_keys(root(DIGEST), ids, 2)


def test_lora_and_salt_and_their_order_change_every_key() -> None:
    extras: list[list[bytes]] = [
        [],
        [b""],
        [b"a"],
        [b"a", b"b"],
        [b"b", b"a"],
        [b"ab"],
        [b"a", b""],
    ]
    keys = {block_keys(root(DIGEST, extra), TOKENS, 4)[0] for extra in extras}
    assert len(keys) == len(extras)
    mixed = {mix(root(DIGEST, extra), b"12345678") for extra in extras}
    assert len(mixed) == len(extras)


@pytest.mark.parametrize(
    "tokens",
    [[-1], [1 << 32], [1 << 70], [1.5], ["a"], [[1, 2]], np.zeros((2, 2), np.int64), [True]],
)
def test_token_ids_that_are_no_u32_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="token ids"):
        block_keys(root(DIGEST), tokens, 4)


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="digest_bytes=31"):
        root(bytes(31))
    with pytest.raises(InvalidArgument, match="parent_bytes=8"):
        chain(bytes(8), [1])
    with pytest.raises(InvalidArgument, match="tokens=0"):
        chain(bytes(32), [])
    with pytest.raises(InvalidArgument, match="block_tokens=0"):
        block_keys(bytes(32), [1], 0)
    with pytest.raises(InvalidArgument, match="too many extra keys count=65"):
        root(DIGEST, [b"x"] * 65)
    with pytest.raises(InvalidArgument, match="extra key is too long bytes=4097"):
        root(DIGEST, [bytes(4097)])
    with pytest.raises(InvalidArgument, match="key_bytes=7"):
        mix(bytes(32), bytes(7))


@given(
    keys=st.lists(st.binary(min_size=16, max_size=16), max_size=9),
    salt=st.integers(0, 2**64 - 1),
)
def test_a_batch_has_the_fingerprint_of_each_key(keys: list[bytes], salt: int) -> None:
    batch = key_batch(b"".join(keys), 16, salt)
    assert len(batch) == len(keys)
    assert batch.fingerprints.dtype == np.uint64
    assert batch.fingerprints.shape == (len(keys), 2)
    for i, key in enumerate(keys):
        assert batch.key(i) == key
        assert tuple(map(int, batch.fingerprints[i])) == fingerprint(key, salt)
        stored = xxhash.xxh3_128_intdigest(key, salt).to_bytes(16, "little")
        assert batch.fingerprints[i].astype("<u8").tobytes() == stored


def test_equal_keys_of_two_namespaces_have_different_fingerprints() -> None:
    assert fingerprint(bytes(32), seed(digest(PLAIN))) != fingerprint(bytes(32), 0)


@pytest.mark.parametrize(
    ("size", "key_bytes", "message"),
    [
        (70, 7, "key_bytes=7"),
        (130, 65, "key_bytes=65"),
        (0, 0, "key_bytes=0"),
        (33, 32, "bytes=33 key_bytes=32"),
        (4097 * 8, 8, "keys=4097 max=4096"),
    ],
)
def test_a_malformed_batch_is_refused(size: int, key_bytes: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        key_batch(bytes(size), key_bytes, 0)
    with pytest.raises(InvalidArgument, match=message):
        mix_batch(bytes(32), bytes(size), key_bytes)


def test_the_largest_batch_is_accepted() -> None:
    assert len(key_batch(bytes(4096 * 64), 64, 0)) == 4096


def test_mix_batch_is_mix_of_each_key() -> None:
    packed = bytes(range(40))
    parts = [mix(bytes(32), packed[i : i + 8]) for i in range(0, 40, 8)]
    assert mix_batch(bytes(32), packed, 8) == b"".join(parts)
