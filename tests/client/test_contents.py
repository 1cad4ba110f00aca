"""Which keys say what their blocks contain."""

import pytest

from kvstored.client import GroupKind, GroupSpec, Keys
from kvstored.client.keys import token_keys
from kvstored.core.keys import content_keys, root
from kvstored.errors import InvalidArgument

from .conftest import BLOCK_TOKENS, spec_with

DIGEST = bytes(range(32))
TOKENS = list(range(3 * BLOCK_TOKENS + 5))
LARGE = spec_with(GroupSpec("kv", GroupKind.LINEAR, 64 << 10))


def test_keys_of_blocks_that_are_coded_say_what_they_contain_in_every_part() -> None:
    keys = token_keys(DIGEST, LARGE, TOKENS, ["salt"])
    told = content_keys(root(DIGEST, [b"salt"]), TOKENS, BLOCK_TOKENS)
    assert keys.content_keys == tuple(told)
    assert keys[1:3].content_keys == tuple(told[1:3])


def test_keys_of_small_blocks_do_not() -> None:
    assert token_keys(DIGEST, spec_with(), TOKENS).content_keys == ()


def test_an_engine_gives_one_for_each_of_its_keys_or_none() -> None:
    keys = Keys.opaque([b"k" * 16, b"l" * 16], content_keys=[b"c" * 16, bytes(16)])
    assert keys[1:].content_keys == (bytes(16),)
    with pytest.raises(InvalidArgument, match="content_keys=1 keys=2"):
        Keys.opaque([b"k" * 16, b"l" * 16], content_keys=[b"c" * 16])


def test_what_blocks_contain_is_no_part_of_what_keys_are() -> None:
    assert Keys.opaque([b"k" * 16], content_keys=[b"c" * 16]) == Keys.opaque([b"k" * 16])
