import os
import socket
from collections.abc import Iterator

import pytest

from kvstored.notify import MESSAGE_BYTES_MAX, Listener, Notifier, handed_down, listen_fds


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def notifier(listener: Listener) -> Notifier:
    return Notifier(listener.address)


def test_states_arrive_as_fields_with_the_senders_pid(
    listener: Listener, notifier: Notifier
) -> None:
    notifier.ready("serving\nwell")
    notifier.stopping()
    notifier.status("flushing")
    messages = [listener.receive() for _ in range(3)]
    assert [message.fields for message in messages if message] == [
        [("READY", "1"), ("STATUS", "serving well")],
        [("STOPPING", "1")],
        [("STATUS", "flushing")],
    ]
    assert {message.pid for message in messages if message} == {os.getpid()}
    assert listener.receive() is None


def test_a_stored_descriptor_arrives_with_its_name_and_content(
    listener: Listener, notifier: Notifier
) -> None:
    memfd = os.memfd_create("x")
    os.write(memfd, b"content")
    assert notifier.store("kvstored-seg-0-1", memfd)
    os.close(memfd)
    message = listener.receive()
    assert message is not None
    assert ("FDNAME", "kvstored-seg-0-1") in message.fields
    (fd,) = message.fds
    assert os.pread(fd, 10, 0) == b"content"
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_nobody_listening_is_no_error() -> None:
    notifier = Notifier(None)
    assert not notifier.remove("x")
    assert not Notifier("/nowhere/notify").send([("READY", "1")])
    assert not Notifier("@kvstored-nobody").send([("READY", "1")])


def test_garbage_and_oversize_datagrams_are_empty_messages(listener: Listener) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        address = "\0" + listener.address[1:]
        sender.sendto(b"\xff\x00garbage\n\n=\nA=B=C", address)
        sender.sendto(b"READY=1\n" + b"x" * MESSAGE_BYTES_MAX, address)
    first, second = listener.receive(), listener.receive()
    assert first is not None
    assert second is not None
    assert first.fields == [("A", "B=C")]
    assert second.fields == []


def test_the_notify_socket_is_taken_out_of_the_environment(listener: Listener) -> None:
    environ = {"NOTIFY_SOCKET": listener.address}
    assert Notifier.from_environment(environ).send([("READY", "1")])
    assert environ == {}


def test_descriptors_meant_for_another_process_are_left_alone() -> None:
    environ = handed_down({"LISTEN_PID": "old", "HOME": "/"}, ["a", "b"], pid=1)
    assert environ["LISTEN_FDNAMES"] == "a:b"
    assert listen_fds(environ) == []
    assert environ == {"HOME": "/"}


def test_without_descriptors_a_child_gets_no_variables() -> None:
    assert handed_down({"LISTEN_FDS": "2"}, [], pid=1) == {}
