"""Staying awake: the loop's side by a clock and a loop made by hand, the client's over a pair of sockets."""

import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstored.client.connection import Connection
from kvstored.clock import ManualClock
from kvstored.errors import DeadlineExceeded, Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.polling import BusyPoll
from kvstored.wire.frames import HEADER, HEADER_BYTES, frame
from kvstored.wire.methods import BY_NAME
from kvstored.wire.status import OK

STAT = BY_NAME["Stat"].number
WINDOW_S = 0.5


class Loop:
    """Counts turns; each takes a tenth of the window."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.clock = ManualClock()
        self.ready: list[Callable[[], object]] = []
        self.polling = BusyPoll(window_s, self.clock)

    def call_soon(self, call: Callable[..., object], *arguments: object) -> None:
        self.ready.append(lambda: call(*arguments))

    def serve(self, after_s: float) -> None:
        self.clock.advance(after_s)
        self.polling.received()
        self.polling.answered(self.call_soon)

    def run(self) -> int:
        turns = 0
        while self.ready:
            ready, self.ready = self.ready, []
            assert len(ready) == 1, "one chain of turns, whatever was answered"
            ready[0]()
            turns += 1
            self.clock.advance(WINDOW_S / 10)
        return turns


class TestTheLoop:
    def test_who_calls_now_and_then_costs_no_turn(self) -> None:
        loop = Loop()
        for _ in range(5):
            loop.serve(WINDOW_S)
            assert not loop.ready

    def test_a_message_soon_after_an_answer_keeps_it_awake_for_the_window(self) -> None:
        loop = Loop()
        loop.serve(WINDOW_S)
        for _ in range(3):
            loop.serve(0.9 * WINDOW_S)
            loop.polling.answered(loop.call_soon)
        assert 10 <= loop.run() <= 12
        loop.serve(WINDOW_S)
        assert not loop.ready, "asleep again"

    def test_a_window_of_nothing_never_turns(self) -> None:
        loop = Loop(0)
        for _ in range(3):
            loop.serve(0)
        assert not loop.ready


class Ticking:
    """A clock that goes on by so much with every look at it."""

    def __init__(self, step_s: float) -> None:
        self.step_s, self.reads = step_s, 0

    def now_s(self) -> float:
        return self.elapsed_s()

    def elapsed_s(self) -> float:
        self.reads += 1
        return self.reads * self.step_s


class Daemon:
    """The other end of one connection: answers when it is told to. `looks`: receives of the client that found nothing."""

    def __init__(self, path: Path) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.connection = Connection(str(path), 5)
        self.peer, _ = self.listener.accept()
        self.looks = 0
        self.sleeps = 0
        self.before_look: Callable[[], None] = lambda: None
        self.before_sleep: Callable[[], None] = lambda: None
        self._inner = self.connection._socket
        self._answered = self.connection._answered
        self.connection._socket = self  # type: ignore[assignment]
        self.connection._answered = self  # type: ignore[assignment]

    def recv_into(self, view: memoryview, size: int = 0, flags: int = 0) -> int:
        if flags & socket.MSG_DONTWAIT:
            self.before_look()
            self.looks += 1
        return self._inner.recv_into(view, size, flags)

    def poll(self, milliseconds: int) -> object:
        self.sleeps += 1
        self.before_sleep()
        return self._answered.poll(milliseconds)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def answer(self) -> None:
        head = self.peer.recv(HEADER_BYTES, socket.MSG_WAITALL)
        payload_bytes, method, _, call = HEADER.unpack(head)
        self.peer.recv(payload_bytes, socket.MSG_WAITALL)
        self.peer.sendall(frame(method, OK, call, pb.StatResponse(epoch=7).SerializeToString()))

    def call(self, timeout_s: float = 5) -> pb.StatResponse:
        return self.connection.call("Stat", pb.StatRequest(), pb.StatResponse, timeout_s)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        made = Daemon(Path(folder) / "s")
        yield made
        made.connection.close()
        made.peer.close()
        made.listener.close()


class TestTheClient:
    def test_an_answer_within_the_window_is_taken_without_sleeping(self, daemon: Daemon) -> None:
        daemon.connection.busy_poll(60, Ticking(1e-6))
        daemon.before_look = lambda: daemon.answer() if daemon.looks == 3 else None
        assert daemon.call().epoch == 7
        assert (daemon.looks, daemon.sleeps) == (4, 0)

    def test_a_later_one_is_slept_for_and_the_next_one_too_until_one_is_soon(
        self, daemon: Daemon
    ) -> None:
        daemon.connection.busy_poll(4e-6, Ticking(1e-6))
        daemon.before_sleep = daemon.answer
        assert daemon.call().epoch == 7
        assert daemon.sleeps == 1
        daemon.connection.busy_poll(60, Ticking(1e-6))
        looks = daemon.looks
        assert daemon.call().epoch == 7
        assert (daemon.looks, daemon.sleeps) == (looks, 2), "the last one was late"
        daemon.before_look = daemon.answer
        assert daemon.call().epoch == 7
        assert (daemon.looks, daemon.sleeps) == (looks + 1, 2), "the last one was soon"

    def test_where_others_use_the_core_it_sleeps_but_looks_again_for_the_next(
        self, daemon: Daemon
    ) -> None:
        daemon.connection.busy_poll(60, Ticking(1e-4))
        daemon.before_sleep = daemon.answer
        for _ in range(3):
            assert daemon.call().epoch == 7
        assert (daemon.looks, daemon.sleeps) == (3, 3)

    def test_an_answer_that_never_comes_is_still_too_late(self, daemon: Daemon) -> None:
        daemon.connection.busy_poll(1e-4, Ticking(1e-6))
        with pytest.raises(DeadlineExceeded, match="did not answer in time"):
            daemon.call(0.01)
        assert daemon.looks > 0

    def test_a_daemon_that_hangs_up_meanwhile_is_gone(self, daemon: Daemon) -> None:
        daemon.connection.busy_poll(60, Ticking(1e-6))
        daemon.before_look = daemon.peer.close
        with pytest.raises(Unavailable):
            daemon.call()

    def test_without_a_window_nothing_is_looked_for(self, daemon: Daemon) -> None:
        daemon.before_sleep = daemon.answer
        assert daemon.call().epoch == 7
        assert daemon.looks == 0


class TestSignals:
    @pytest.mark.parametrize("packed", [b"", bytes(4 << 20)], ids=["receiving", "sending"])
    def test_handlers_of_the_caller_s_signals_put_off_no_deadline(
        self, daemon: Daemon, packed: bytes
    ) -> None:
        """A socket's own timeouts begin anew with every one of them: a profiler's timer made a daemon that hangs hang its engine."""
        ended, main = threading.Event(), threading.main_thread().ident
        assert main is not None
        before = signal.signal(signal.SIGUSR2, lambda *_: None)

        def interrupt() -> None:
            for _ in range(1000):
                if ended.wait(0.02):
                    return
                signal.pthread_kill(main, signal.SIGUSR2)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        try:
            request = pb.MatchRequest(keys=pb.Keys(packed=packed))
            with pytest.raises(DeadlineExceeded):
                daemon.connection.call("Match", request, pb.MatchResponse, 0.05)
            assert interrupting.is_alive(), "only when the signals ended"
        finally:
            ended.set()
            interrupting.join()
            signal.signal(signal.SIGUSR2, before)
