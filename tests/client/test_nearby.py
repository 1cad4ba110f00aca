"""A client that was given host:port uses shared memory where the daemon is on its own host, and streams where it is not."""

from pathlib import Path

import pytest

from kvstored.client import nearby
from kvstored.client.nearby import host_id, reachable_socket


def test_the_socket_of_this_host_is_near(tmp_path: Path) -> None:
    socket = tmp_path / "k.sock"
    socket.touch()
    assert reachable_socket(host_id(), str(socket)) == str(socket)


def test_another_host_is_not_near_even_with_the_same_path(tmp_path: Path) -> None:
    socket = tmp_path / "k.sock"
    socket.touch()
    assert reachable_socket("another boot", str(socket)) is None


def test_a_socket_that_this_process_cannot_see_is_not_near(tmp_path: Path) -> None:
    assert reachable_socket(host_id(), str(tmp_path / "absent.sock")) is None


def test_a_host_that_does_not_tell_is_not_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearby, "_BOOT_ID", tmp_path / "absent")
    assert host_id() == ""
    assert reachable_socket("", str(tmp_path)) is None
