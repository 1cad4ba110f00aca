"""What an engine's attention selected, told to a real daemon."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstored.client import Client, InvalidArgument, Namespace, Tag
from tests.client.conftest import BLOCK_TOKENS, spec_with
from tests.crash.served import Served


@pytest.fixture
def stored() -> Iterator[Namespace]:
    """With three blocks of a path of four."""
    with (
        tempfile.TemporaryDirectory(prefix="kvs") as folder,
        Served(Path(folder)) as served,
        Client(served.address, timeout_s=10) as client,
    ):
        namespace = client.open_namespace(spec_with())
        keys = namespace.keys(range(3 * BLOCK_TOKENS))
        namespace.put(keys, [np.zeros(8192, np.uint8)] * 3)
        yield namespace


def test_selected_blocks_that_are_there_are_counted_as_used(stored: Namespace) -> None:
    keys = stored.keys(range(4 * BLOCK_TOKENS))
    assert stored.report(keys, [2.5, 0, 1.0, 0]) == 2
    assert stored.report(keys, [0, 0, 0, 7.0], group="kv") == 0  # not stored
    assert stored.report(keys, [0, 0, 0, 0]) == 0


def test_a_report_that_does_not_fit_is_refused(stored: Namespace) -> None:
    keys = stored.keys(range(2 * BLOCK_TOKENS))
    with pytest.raises(InvalidArgument, match="one score a key"):
        stored.report(keys, [1.0])
    with pytest.raises(InvalidArgument, match="no such group name='window' groups=\\['kv'\\]"):
        stored.report(keys, [1.0, 1.0], group="window")


def test_what_a_block_holds_is_told_alone_or_with_what_was_selected(stored: Namespace) -> None:
    keys = stored.keys(range(3 * BLOCK_TOKENS))
    tags = [Tag(0), Tag.ENTITY | Tag.NUMBER, Tag.SIGNATURE]
    told = stored.report_access(keys, tags=tags)
    assert (told.taken, told.blocks, told.raised) == (True, 3, 0)
    assert stored.report_access(keys, [True, True, True], tags=tags).blocks == 3
    with pytest.raises(InvalidArgument, match="a byte a key, of known tags"):
        stored.report_access(keys, tags=tags[:2])
