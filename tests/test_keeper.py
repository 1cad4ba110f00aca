"""The keeper with small stand-ins for daemon and front, as real processes."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypedDict

import psutil
import pytest

from kvstored.errors import StateMismatch
from kvstored.notify import Listener, Message
from kvstored.statedir import KeeperStatus, StateLock, read_status

ROOT = Path(__file__).parent.parent
CHILD = Path(__file__).parent / "fake_child.py"
LAUNCH = """
import json, sys
from kvstored.launch import ChildPlan, Plan, launch
state_dir, drain_s, *behaviours = sys.argv[1:]
children = [
    ChildPlan(name, [sys.executable, CHILD, state_dir, behaviour], name == "daemon", 1 if name == "daemon" else 15)
    for name, behaviour in zip(["daemon", "front"], behaviours)
]
launch(Plan(state_dir, float(drain_s), False, children), "the configuration", 0)
"""


class Start(TypedDict):
    """What a stand-in wrote at its start."""

    pid: int
    fds: dict[str, str]
    config: str


class Keepers:
    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(
        self, *behaviours: str, drain_s: float = 0, **environ: str
    ) -> subprocess.Popen[bytes]:
        code = LAUNCH.replace("CHILD", repr(str(CHILD)))
        command = [sys.executable, "-c", code, str(self.state_dir), str(drain_s), *behaviours]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
        process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.processes.append(process)
        return process

    def starts(self, behaviour: str) -> list[Start]:
        path = self.state_dir / f"{behaviour}.starts"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def status(self) -> KeeperStatus:
        status = read_status(str(self.state_dir))
        assert status is not None
        return status

    def ready(self, *, starts: int = 1) -> KeeperStatus:
        """Once every child is ready, the daemon after so many starts."""

        def is_so() -> bool:
            now = read_status(str(self.state_dir))
            return (
                now is not None
                and bool(now.children)
                and all(child.is_ready for child in now.children.values())
                and now.children["daemon"].starts >= starts
            )

        until(is_so)
        return self.status()


@pytest.fixture
def keepers(tmp_path: Path) -> Iterator[Keepers]:
    keepers = Keepers(tmp_path)
    yield keepers
    for process in keepers.processes:
        process.kill()
        process.communicate(timeout=10)


def until(is_so: Callable[[], bool], *, timeout_s: float = 20) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not come to be so"
        time.sleep(0.01)


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    _, log = process.communicate(timeout=20)
    return process.returncode, log.decode()


def test_a_killed_daemon_starts_again_with_its_descriptors_and_their_content(
    keepers: Keepers,
) -> None:
    keepers.start("store", "serve")
    status = keepers.ready()
    os.kill(status.children["daemon"].pid, signal.SIGKILL)
    again = keepers.ready(starts=2)
    first, second = keepers.starts("store")
    assert first["fds"] == {}
    assert second["fds"] == {"segment-0": "content 0", "segment-2": "content 2"}
    assert first["config"] == second["config"] == "the configuration"
    assert again.children["front"] == status.children["front"]
    assert again.keeper_pid == status.keeper_pid


def test_a_restart_replaces_both_and_keeps_descriptors(keepers: Keepers) -> None:
    process = keepers.start("store", "serve")
    status = keepers.ready()
    os.kill(process.pid, signal.SIGHUP)
    until(lambda: keepers.status().children["front"].starts == 2)
    again = keepers.ready(starts=2)
    assert len(keepers.starts("store")[1]["fds"]) == 2
    assert not {c.pid for c in status.children.values()} & {c.pid for c in again.children.values()}


def test_sigterm_ends_all_with_exit_code_0(keepers: Keepers) -> None:
    process = keepers.start("store", "serve")
    status = keepers.ready()
    process.terminate()
    code, log = ended(process)
    assert code == 0, log
    assert not any(psutil.pid_exists(child.pid) for child in status.children.values())
    assert read_status(str(keepers.state_dir)) is None


def test_a_child_that_does_not_drain_is_killed_at_a_second_signal(keepers: Keepers) -> None:
    process = keepers.start("stubborn", "serve", drain_s=3600)
    keepers.ready()
    process.terminate()
    until(lambda: keepers.status().children["front"].pid == 0)
    time.sleep(1.1)
    process.terminate()
    code, log = ended(process)
    assert code == 1
    assert "[warning] keeper: told to stop again" in log
    assert "[error] keeper: child does not end, killing it" in log


def test_signals_at_once_are_one_and_the_drain_goes_on(keepers: Keepers) -> None:
    """`timeout` signals the process and then its group: the second killed a daemon that was draining."""
    process = keepers.start("slow", "serve", drain_s=3600)
    keepers.ready()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.05)
    code, log = ended(process)
    assert code == 0, log
    assert "killing" not in log


def test_a_crash_loop_is_slowed_down_and_the_keeper_lives(keepers: Keepers) -> None:
    process = keepers.start("crash", "serve")
    until(lambda: len(keepers.starts("crash")) >= 5)
    assert process.poll() is None
    process.terminate()
    code, log = ended(process)
    assert code == 0
    delays = [line.rpartition("=")[2] for line in log.splitlines() if "died" in line]
    assert delays[:4] == ["0.0", "0.1", "0.2", "0.4"]
    assert "[error] keeper: child died, starting it again child=daemon pid=" in log


def test_a_daemon_that_its_descriptors_kill_starts_cold_in_the_end(keepers: Keepers) -> None:
    keepers.start("poisoned", "serve")
    status = keepers.ready()
    os.kill(status.children["daemon"].pid, signal.SIGKILL)
    keepers.ready(starts=3)
    starts = keepers.starts("poisoned")
    assert [bool(start["fds"]) for start in starts] == [False, *[True] * (len(starts) - 2), False]


def test_a_child_that_refuses_its_configuration_ends_the_keeper_with_78(keepers: Keepers) -> None:
    code, log = ended(keepers.start("refuse", "serve"))
    assert code == 78
    assert "refused" in log


def test_a_second_keeper_refuses_and_names_the_first(keepers: Keepers) -> None:
    first = keepers.start("serve", "serve")
    keepers.ready()
    code, log = ended(keepers.start("serve", "serve"))
    assert code == 78
    assert "[error] keeper: keeper cannot start error=" in log
    assert f"pid={first.pid}" in log
    with pytest.raises(StateMismatch, match=f"pid={first.pid}"):
        StateLock.take(str(keepers.state_dir))


def test_children_die_with_a_killed_keeper_and_the_next_one_starts(keepers: Keepers) -> None:
    first = keepers.start("store", "serve")
    status = keepers.ready()
    first.kill()
    first.wait()
    keepers.start("store", "serve")
    keepers.ready()
    until(lambda: not any(psutil.pid_exists(child.pid) for child in status.children.values()))
    assert keepers.starts("store")[1]["fds"] == {}


def _upstream(listener: Listener, messages: list[Message]) -> bool:
    while (message := listener.receive()) is not None:
        messages.append(message)
    return any(("READY", "1") in message.fields for message in messages)


def test_under_systemd_the_keeper_passes_states_and_descriptors_up_and_down(
    keepers: Keepers,
) -> None:
    listener = Listener()
    messages: list[Message] = []
    process = keepers.start("store", "serve", NOTIFY_SOCKET=listener.address)
    until(lambda: _upstream(listener, messages))
    assert {message.pid for message in messages} == {process.pid}
    fields = [dict(message.fields) for message in messages]
    stored = {each["FDNAME"]: m.fds for each, m in zip(fields, messages, strict=True) if m.fds}
    assert sorted(stored) == ["segment-0", "segment-1", "segment-2"]
    assert any(each.get("FDSTOREREMOVE") and each["FDNAME"] == "segment-1" for each in fields)
    assert {"STATUS": "daemon: here"} in fields

    process.kill()  # systemd keeps the descriptors and hands them to the next keeper
    process.wait()
    kept = {"segment-0": stored["segment-0"][0], "segment-2": stored["segment-2"][0]}
    _start_with(keepers, kept)
    keepers.ready()
    assert keepers.starts("store")[1]["fds"] == {
        "segment-0": "content 0",
        "segment-2": "content 2",
    }
    for message in messages:
        for fd in message.fds:
            os.close(fd)
    listener.close()


def _start_with(keepers: Keepers, fds: dict[str, int]) -> None:
    """As systemd does: descriptors from 3 on, named by variables."""
    variables = f"LISTEN_FDS={len(fds)} LISTEN_FDNAMES={':'.join(fds)}"
    code = LAUNCH.replace("CHILD", repr(str(CHILD)))
    arguments = [sys.executable, "-c", code, str(keepers.state_dir), "0", "store", "serve"]
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in fds.values()]
    shell = "".join(f"exec {number}<&{fd} {fd}<&-;" for number, fd in enumerate(high, 3))
    command = f'{shell} export {variables} LISTEN_PID=$$; exec "$0" "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=high,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    keepers.processes.append(process)
    for fd in high:
        os.close(fd)


def test_messages_of_strangers_are_ignored(keepers: Keepers) -> None:
    keepers.start("store", "serve")
    status = keepers.ready()
    environ = psutil.Process(status.children["daemon"].pid).environ()
    address = "\0" + environ["NOTIFY_SOCKET"][1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(b"FDSTOREREMOVE=1\nFDNAME=segment-0", address)
        stranger.sendto(b"\xff" * 100, address)
    os.kill(status.children["daemon"].pid, signal.SIGKILL)
    keepers.ready(starts=2)
    assert "segment-0" in keepers.starts("store")[1]["fds"]


def test_the_keeper_stays_small(keepers: Keepers) -> None:
    """Its own memory; the interpreter's pages are shared with every other Python process."""
    process = keepers.start("store", "serve")
    keepers.ready()
    own_bytes = psutil.Process(process.pid).memory_full_info().uss
    assert own_bytes < 10 * 2**20


def test_no_keeper_is_no_status(tmp_path: Path) -> None:
    assert read_status(str(tmp_path)) is None
    (tmp_path / "lock").write_text("garbage")
    assert read_status(str(tmp_path)) is None
    with contextlib.closing(StateLock.take(str(tmp_path))):
        assert read_status(str(tmp_path)) == KeeperStatus(os.getpid(), {})
