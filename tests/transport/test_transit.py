"""A transfer that takes longer than its session lives without being used."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstored.client import Client, Keys, remote
from kvstored.client.bulk_socket import BulkSocket
from kvstored.errors import Unavailable
from tests.crash.blocks import content_of, spec_of
from tests.crash.served import Served, free_port, wait_until

SIZE = 1 << 20
TAKES_S = 3.5
KEYS = [n.to_bytes(32, "big") for n in range(4)]


@pytest.fixture(scope="module")
def listen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    address = f"127.0.0.1:{free_port()}"
    folder = tmp_path_factory.mktemp("served")
    with Served(
        folder, dram="64MiB", disk="0B", listen=address, settings={"limits.resume_ttl": "1500ms"}
    ):
        yield address


def is_up(client: Client) -> bool:
    try:
        client.session()
    except Unavailable:
        return False
    return True


@pytest.mark.parametrize("scheme", ["grpc", "bulk"])
def test_a_put_whose_bytes_come_slowly_is_stored(
    listen: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages, send = remote.put_messages, BulkSocket.send_summed

    def slow_messages(*given: Any) -> Iterator[Any]:  # Any: handed on as it is
        for number, message in enumerate(messages(*given)):
            if number == 1:
                time.sleep(TAKES_S)
            yield message

    def slow_send(self: BulkSocket, *given: Any, **more: Any) -> Any:
        time.sleep(TAKES_S)
        return send(self, *given, **more)

    with Client(f"{scheme}://{listen}", timeout_s=20) as client:
        wait_until(lambda: is_up(client))
        namespace = client.open_namespace(spec_of(SIZE))
        monkeypatch.setattr(remote, "put_messages", slow_messages)
        monkeypatch.setattr(BulkSocket, "send_summed", slow_send)
        keys = Keys.opaque([scheme.encode() + key[8:] for key in KEYS])
        begun = time.monotonic()
        put = namespace.put(keys, [content_of(key, SIZE) for key in keys])
        assert time.monotonic() - begun > TAKES_S
        assert put.committed == len(KEYS)
