"""The keeper: the small process that `kvstored serve` becomes. It owns the state directory's lock and the descriptors of the DRAM
segments, so that these outlive the daemon; it starts daemon and front, starts them again when they end, and stops them on SIGTERM.

It speaks systemd's protocol downwards (READY, STATUS, FDSTORE, LISTEN_FDS) and, under systemd, upwards: the same code path keeps DRAM warm
over the daemon's death here and over the keeper's own death there. It must never die from a child, and imports only the standard library's
small modules (a few MB of its own memory). Signals: SIGTERM, SIGINT stop (a second one, not at once, kills); SIGHUP replaces the daemon.
"""

import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from kvstored.errors import KvstoredError
from kvstored.launch import ChildPlan, Plan, read_plan
from kvstored.notify import (
    LISTEN_FDS_START,
    Listener,
    Message,
    Notifier,
    handed_down,
    is_name,
    listen_fds,
)
from kvstored.statedir import ChildStatus, KeeperStatus, StateLock

EXIT_REFUSED = 78
"""Of a process that cannot start as it is configured (EX_CONFIG): trying again is no use."""
FDS_MAX = 4096
NAMES_BYTES_MAX = 120_000
"""Of all descriptors' names: they travel in one variable, of which the kernel takes 128 KiB."""

_NOFILE = 65536
_BACKOFF_FIRST_S, _BACKOFF_MAX_S = 0.1, 10.0
_HEALTHY_S = 2.0
"""A child that was ready for so long did not crash in a loop: its next start is immediate again."""
_COLD_AFTER = 6
"""Starts in a row that failed before ready, after which a daemon gets no descriptors: what they hold may be what kills it."""
_RESTART_GRACE_S = 10.0
_STOP_GRACE_S = 5.0
"""Beyond the time that draining may take."""
_ONE_SIGNAL_S = 1.0
"""Signals so close are one wish: `timeout` and terminals signal the process and its group."""


class _Child:
    """A child's life over its starts."""

    __slots__ = (
        "failures",
        "is_leaving",
        "is_ready",
        "kill_at_s",
        "pid",
        "plan",
        "ready_at_s",
        "start_at_s",
        "starts",
        "was_ready",
    )

    def __init__(self, plan: ChildPlan) -> None:
        self.plan = plan
        self.pid = 0
        self.starts = 0
        self.failures = 0
        self.is_ready = False
        self.was_ready = False
        self.is_leaving = False
        self.ready_at_s = 0.0
        self.start_at_s: float | None = 0.0
        self.kill_at_s: float | None = None

    def status(self) -> ChildStatus:
        return ChildStatus(self.pid, self.is_ready, self.starts)

    def signal(self, number: int) -> None:
        if self.pid:
            os.kill(self.pid, number)


class Keeper:
    def __init__(
        self,
        plan: Plan,
        config_fd: int,
        lock: StateLock,
        outer: Notifier,
        stored: list[tuple[str, int]],
    ) -> None:
        self._plan = plan
        self._config_fd = config_fd
        self._lock = lock
        self._outer = outer
        self._stored = stored
        self._children = [_Child(child) for child in plan.children]
        self._listener = Listener()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._signals: list[int] = []
        self._published: dict[str, ChildStatus] = {}
        self._is_announced = False
        self._exit_code: int | None = None
        """Set once it stops."""
        self._stopped_at_s = 0.0

    def run(self) -> int:
        """Until told to stop; the exit code."""
        self._catch_signals()
        poll = select.poll()
        poll.register(self._listener.fileno(), select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while self._exit_code is None or any(child.pid for child in self._children):
            self._start_due()
            self._publish()
            poll.poll(self._wait_ms())
            self._drain_wakeups()
            self._receive()
            self._reap()
            self._obey()
            self._kill_due()
        self._publish()
        self._log("keeper ended", {"exit": self._exit_code})
        return self._exit_code

    # signals

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, self._caught)

    def _caught(self, number: int, _frame: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def _drain_wakeups(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            return

    def _obey(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            # a hang-up of the terminal that it runs in is an end, not a wish for a restart
            if number == signal.SIGHUP and not os.isatty(0):
                self._restart()
            elif self._exit_code is None:
                self._stop(0)
            elif time.monotonic() - self._stopped_at_s > _ONE_SIGNAL_S:
                left = [child.plan.name for child in self._children if child.pid]
                facts = {"signal": signal.Signals(number).name, "children": ",".join(left)}
                self._log("told to stop again: killing what has not ended", facts, "warning")
                for child in self._children:
                    child.kill_at_s = time.monotonic()

    def _stop(self, exit_code: int) -> None:
        self._log("stopping", {"drain_s": self._plan.drain_s})
        self._outer.stopping()
        self._exit_code = exit_code
        self._stopped_at_s = time.monotonic()
        for child in self._children:
            child.start_at_s = None
            child.kill_at_s = time.monotonic() + self._plan.drain_s + _STOP_GRACE_S
            child.signal(signal.SIGTERM)

    def _restart(self) -> None:
        if self._exit_code is not None:
            return
        self._log("restarting children", {"descriptors": len(self._stored)})
        for child in self._children:
            child.failures = 0
            if child.pid:
                child.is_leaving = True
                child.kill_at_s = time.monotonic() + _RESTART_GRACE_S
                child.signal(child.plan.restart_signal)
            else:
                child.start_at_s = time.monotonic()

    # children

    def _start_due(self) -> None:
        for child in self._children:
            if child.start_at_s is not None and child.start_at_s <= time.monotonic():
                child.start_at_s = None
                if child.plan.keeps_fds and child.failures == _COLD_AFTER and not child.was_ready:
                    self._forget_all()
                self._start(child)

    def _start(self, child: _Child) -> None:
        stored = self._stored if child.plan.keeps_fds else []
        keeper_pid = os.getpid()
        child.pid = os.fork()
        if child.pid == 0:
            try:
                self._become(child.plan, stored, keeper_pid)
            except OSError as error:
                facts = {"child": child.plan.name, "error": error}
                self._log("child cannot be started", facts, "error")
            finally:
                os._exit(127)
        child.starts += 1
        child.is_ready = child.is_leaving = child.was_ready = False
        child.kill_at_s = None
        facts = {"child": child.plan.name, "pid": child.pid, "descriptors": len(stored)}
        self._log("child started", facts)

    def _become(self, plan: ChildPlan, stored: Sequence[tuple[str, int]], keeper_pid: int) -> None:
        """In the forked child: puts the descriptors where the protocol wants them and becomes the program."""
        signal.set_wakeup_fd(-1)
        os.setpgid(0, 0)  # a terminal's ctrl-c is the keeper's alone
        fds = [*(fd for _, fd in stored), self._config_fd, self._lock.fd]
        above = LISTEN_FDS_START + len(fds)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds]
        for number, fd in enumerate(moved, LISTEN_FDS_START):
            os.dup2(fd, number)
        environ = handed_down(os.environ, [name for name, _ in stored], os.getpid())
        environ["NOTIFY_SOCKET"] = self._listener.address
        config_fd = LISTEN_FDS_START + len(stored)
        options = ["--config-fd", str(config_fd), "--keeper-pid", str(keeper_pid)]
        os.execve(plan.argv[0], [*plan.argv, *options], environ)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._receive()  # whatever it sent before its end is in the queue now
            for child in self._children:
                if child.pid == pid:
                    self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: _Child, code: int) -> None:
        now_s = time.monotonic()
        was_healthy = child.is_ready and now_s - child.ready_at_s >= _HEALTHY_S
        was_leaving, was_killed = child.is_leaving, child.kill_at_s is None
        facts = {"child": child.plan.name, "pid": child.pid, "code": code}
        child.pid, child.is_ready, child.is_leaving = 0, False, False
        if self._exit_code is not None:
            self._log("child ended", facts)
            if was_killed:
                self._exit_code = self._exit_code or 1
            return
        if was_leaving:
            self._log("child ended for its restart", facts)
            child.start_at_s = now_s
            return
        if code == EXIT_REFUSED and not self._is_announced:
            self._log("child refused to start", facts, "error")
            self._stop(EXIT_REFUSED)
            return
        child.failures = 0 if was_healthy else child.failures
        delay_s = min(_BACKOFF_FIRST_S * 2 ** (child.failures - 1), _BACKOFF_MAX_S)
        delay_s = delay_s if child.failures else 0.0
        child.failures += 1
        child.start_at_s = now_s + delay_s
        self._log("child died, starting it again", {**facts, "delay_s": delay_s}, "error")
        self._outer.status(f"{child.plan.name} died with code {code}, starting it again")

    def _kill_due(self) -> None:
        now_s = time.monotonic()
        for child in self._children:
            if child.pid and child.kill_at_s is not None and child.kill_at_s <= now_s:
                facts = {"child": child.plan.name, "pid": child.pid}
                self._log("child does not end, killing it", facts, "error")
                child.kill_at_s = None
                child.signal(signal.SIGKILL)

    def _wait_ms(self) -> int | None:
        times = [
            at_s
            for child in self._children
            for at_s in (child.start_at_s, child.kill_at_s if child.pid else None)
        ]
        due = [at_s for at_s in times if at_s is not None]
        return max(0, int((min(due) - time.monotonic()) * 1000) + 1) if due else None

    # messages

    def _receive(self) -> None:
        while (message := self._listener.receive()) is not None:
            sender = next((c for c in self._children if c.pid and c.pid == message.pid), None)
            if sender is not None:
                self._heed(sender, message)
            for fd in message.fds:
                os.close(fd)

    def _heed(self, sender: _Child, message: Message) -> None:
        fields = dict(message.fields)
        if fields.get("READY") == "1" and not sender.is_ready:
            sender.is_ready = sender.was_ready = True
            sender.ready_at_s = time.monotonic()
            self._log("child ready", {"child": sender.plan.name, "pid": sender.pid})
            self._announce()
        if "STATUS" in fields:
            self._outer.status(f"{sender.plan.name}: {fields['STATUS']}")
        name = fields.get("FDNAME", "stored")
        if not sender.plan.keeps_fds or not is_name(name):
            return
        if fields.get("FDSTORE") == "1":
            self._store(name, message.fds)
        if fields.get("FDSTOREREMOVE") == "1":
            self._forget(name)

    def _announce(self) -> None:
        if not self._is_announced and all(child.is_ready for child in self._children):
            self._is_announced = True
            self._outer.ready("serving")

    def _store(self, name: str, fds: Sequence[int]) -> None:
        held = {(other, _identity(fd)) for other, fd in self._stored}
        for fd in fds:
            if (name, _identity(fd)) in held:
                continue
            names_bytes = sum(len(other) + 1 for other, _ in self._stored) + len(name)
            if len(self._stored) >= FDS_MAX or names_bytes > NAMES_BYTES_MAX:
                facts = {"name": name, "max": FDS_MAX}
                self._log("too many descriptors, not kept", facts, "error")
                return
            self._stored.append((name, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)))
            self._outer.store(name, fd)

    def _forget(self, name: str) -> None:
        for other, fd in self._stored:
            if other == name:
                os.close(fd)
        self._stored = [(other, fd) for other, fd in self._stored if other != name]
        self._outer.remove(name)

    def _forget_all(self) -> None:
        if self._stored:
            facts = {"descriptors": len(self._stored)}
            self._log("starting cold: dropping all descriptors", facts, "warning")
        for name in {name for name, _ in self._stored}:
            self._forget(name)

    def _publish(self) -> None:
        children = {child.plan.name: child.status() for child in self._children}
        if children != self._published:
            self._published = children
            self._lock.publish(KeeperStatus(os.getpid(), children))

    def _log(self, event: str, facts: Mapping[str, object], level: str = "info") -> None:
        _log(event, facts, level, as_json=self._plan.log_json)


def main() -> int:
    plan_fd, config_fd = map(int, sys.argv[1:])
    plan = read_plan(plan_fd)
    os.close(plan_fd)
    os.set_inheritable(config_fd, False)
    outer, stored = Notifier.from_environment(), listen_fds()
    _allow_descriptors()
    try:
        lock = StateLock.take(plan.state_dir)
    except KvstoredError as error:
        _log("keeper cannot start", {"error": error}, "error", as_json=plan.log_json)
        return EXIT_REFUSED
    return Keeper(plan, config_fd, lock, outer, stored).run()


def _allow_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NOFILE if hard == resource.RLIM_INFINITY else min(_NOFILE, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def _identity(fd: int) -> tuple[int, int]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino


def _log(event: str, facts: Mapping[str, object], level: str, *, as_json: bool) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if as_json:
        line = json.dumps(
            {"timestamp": stamp, "level": level, "logger": "keeper", "event": event, **facts},
            default=str,
        )
    else:
        words = [stamp, f"[{level}] keeper:", event, *(f"{k}={v}" for k, v in facts.items())]
        line = " ".join(words)
    try:
        os.write(2, f"{line}\n".encode())
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
