"""Interrupts of the caller (KeyboardInterrupt, or whatever its signal handlers raise) at every place where Python takes one: where a function begins, and
where one in C has returned. One between taking the lock to connect and noting it had made every later call wait for its whole timeout.
"""

import gc
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from kvstored.client import Client, FillStatus, Keys, Namespace
from kvstored.client.channel import CONNECTIONS_MAX, LocalChannel
from kvstored.client.local_transport import LocalTransport
from tests.client.test_aside import SIZE, namespace, new_keys, put
from tests.crash.blocks import content_of, is_right
from tests.crash.served import Served

__all__ = ["namespace"]

Act = Callable[[Namespace], Keys]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("served")
    with Served(folder, dram="256MiB", disk="0B") as served:
        yield served


@pytest.fixture(autouse=True)
def dropped() -> Iterator[None]:
    """A socket that nobody had noted yet is closed when it is dropped, which warns. Clients of other tests are not to end within an act of these."""
    gc.collect()
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        yield
        gc.enable()
        gc.collect()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.address, timeout_s=5) as client:
        yield client


def interrupted(namespace: Namespace, act: Act, nth: int) -> bool:
    """False where the act has fewer such places."""
    places = 0

    def look(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal places
        # an interrupted Condition is a RuntimeError of threading's own
        is_ours = frame.f_globals["__name__"].startswith("kvstored.")
        if is_ours and event in ("call", "c_return"):
            places += 1
            if places == nth:
                raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        act(namespace)
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def channel_of(client: Client) -> LocalChannel:
    transport = client._transport
    assert isinstance(transport, LocalTransport)
    return transport._channel


def put_some(namespace: Namespace) -> Keys:
    keys = new_keys(2)
    put(namespace, keys)
    return keys


def post_some(namespace: Namespace) -> Keys:
    keys = new_keys(2)
    namespace.post(keys, np.array([content_of(key, SIZE) for key in keys]))
    namespace._client.flush()
    return keys


def get_by_lease(namespace: Namespace) -> Keys:
    namespace.get(KNOWN, optimistic=False)
    return KNOWN


def get_without_a_message(namespace: Namespace) -> Keys:
    namespace.get(KNOWN)
    return KNOWN


def view(namespace: Namespace) -> Keys:
    with namespace.get_view(KNOWN):
        return KNOWN


KNOWN = new_keys(2)


@pytest.mark.parametrize("act", [put_some, get_by_lease, get_without_a_message, view])
def test_whatever_is_interrupted_the_client_goes_on(
    client: Client, namespace: Namespace, act: Act
) -> None:
    channel = channel_of(client)
    put(namespace, KNOWN)
    for nth in itertools.count(1):
        if not interrupted(namespace, act, nth):
            break
        assert channel._slots.free == CONNECTIONS_MAX
        assert channel._connecting.free == 1
    assert nth > 20
    for keys in (put_some(namespace), act(namespace)):
        found = namespace.get(keys, optimistic=False, verify=False)
        for key, block in zip(keys, found.blocks, strict=True):
            assert block is not None
            assert is_right(key, block[0])


def test_connecting_may_be_interrupted_anywhere(client: Client, namespace: Namespace) -> None:
    channel = channel_of(client)
    for nth in itertools.count(1):
        while channel._idle:
            channel._close(channel._idle.pop().connection)
        if not interrupted(namespace, put_some, nth):
            break
        assert channel._slots.free == CONNECTIONS_MAX
        assert channel._connecting.free == 1
    assert nth > 50
    assert put(namespace, new_keys(2)) == (FillStatus.COMMITTED,) * 2


def test_a_post_that_was_interrupted_is_lost_or_stored_and_the_next_ones_are_stored(
    client: Client, namespace: Namespace
) -> None:
    for nth in itertools.count(1):
        post_some(namespace)  # else there are no places, and it is put
        if not interrupted(namespace, post_some, nth):
            break
        assert channel_of(client)._slots.free >= CONNECTIONS_MAX - 1
    assert nth > 50
    client.flush()
    keys = [post_some(namespace) for _ in range(3)]
    found = [namespace.get(each, optimistic=False, verify=False) for each in keys]
    assert all(each.hits == 2 for each in found)
    for each, got in zip(keys, found, strict=True):
        for key, block in zip(each, got.blocks, strict=True):
            assert block is not None
            assert is_right(key, block[0])
