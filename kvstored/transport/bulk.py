"""The bulk channel's server: a TCP listener and one ordinary thread a connection, in the gRPC front's process.

Bytes go between sockets and the mapped arena without a copy, never through the daemon and never on an event loop. Who connects shows
the token of a session that gRPC opened, within HANDSHAKE_S; there are at most `connections_max`.
"""

import hashlib
import os
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from kvstored import logs
from kvstored.client.bulk_socket import BulkSocket
from kvstored.client.framing import Framing
from kvstored.client.segments import Segments
from kvstored.clock import Clock
from kvstored.errors import Busy, ConfigError, KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.bulk_calls import BulkCalls
from kvstored.transport.transit import Transit
from kvstored.wire.bulk import GREETING, HANDSHAKE_S, ID_BYTES, BulkAddress
from kvstored.wire.frames import frame
from kvstored.wire.methods import KEEP_ALIVE
from kvstored.wire.status import failure_of, status_of

log = logs.get("bulk")

_CONNECTIONS_MAX = 64
_BACKLOG = 128
_PAUSE_S = 0.2
_JOIN_S = 2.0
_ANY = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files; `key` may be the same file."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            made.load_cert_chain(self.certificate, self.key)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"the bulk channel's certificate cannot be used: certificate={self.certificate} key={self.key} "
                f"error={error}; both are PEM files"
            ) from error
        return made

    def fingerprint(self) -> bytes:
        text = self.certificate.read_text()
        end = text.index(ssl.PEM_FOOTER) + len(ssl.PEM_FOOTER)
        der = ssl.PEM_cert_to_DER_cert(text[text.index(ssl.PEM_HEADER) : end])
        return hashlib.sha256(der).digest()


@dataclass(slots=True, eq=False)
class _Live:
    """A connection and what of it has been reported. `calls`: once it is past its TLS."""

    connected: socket.socket
    thread: threading.Thread | None = None
    peer: BulkSocket | None = None
    calls: BulkCalls | None = None
    is_known: bool = False
    told: tuple[int, int, int] = (0, 0, 0)


class BulkServer:
    def __init__(
        self,
        host: str,
        port: int,
        *,
        daemon: Path,
        segments: Segments,
        certificate: Certificate | None,
        clock: Clock,
        framing: Framing | None = None,
        connections_max: int = _CONNECTIONS_MAX,
    ) -> None:
        """Binds: raises ConfigError where the address or the certificate cannot be used. `framing`: bytes may travel as frames."""
        self._framing = framing
        self._daemon = daemon
        self._transit = Transit(daemon)
        self._segments = segments
        self._clock = clock
        self._connections_max = connections_max
        self._tls = certificate.context() if certificate is not None else None
        self._listener = _listening(host, port)
        self._live: set[_Live] = set()
        self._facts = pb.ReportBulkRequest()
        self._lock = threading.Lock()
        """Of the two above."""
        self._is_closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="bulk-accept", daemon=True)
        self.address = BulkAddress(
            "" if host in _ANY else host,
            self._listener.getsockname()[1],
            os.urandom(ID_BYTES),
            certificate.fingerprint() if certificate is not None else b"",
        )

    def start(self) -> None:
        self._accepting.start()

    def close(self) -> None:
        """Cuts all connections; what they held is given back before this returns, unless it takes longer than seconds."""
        self._is_closed.set()
        _shut(self._listener)
        with self._lock:
            living = list(self._live)
        for live in living:
            _shut(live.connected)
        for thread in (self._accepting, *(live.thread for live in living)):
            if thread is not None and thread.is_alive():
                thread.join(_JOIN_S)
        self._listener.close()

    def report(self) -> pb.ReportBulkRequest:
        """What happened since the last report."""
        with self._lock:
            for live in self._live:
                self._count(live)
            taken, self._facts = self._facts, pb.ReportBulkRequest()
            taken.connections = len(self._live)
        return taken

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connected, _ = self._listener.accept()
            except OSError as error:
                if not self._is_closed.wait(_PAUSE_S):
                    log.warning("a bulk connection cannot be accepted", error=str(error))
                continue
            live = _Live(connected)
            live.thread = threading.Thread(
                target=self._serve, args=(live,), name="bulk", daemon=True
            )
            with self._lock:
                is_full = len(self._live) >= self._connections_max
                if is_full:
                    self._facts.refused += 1
                else:
                    self._live.add(live)
            if is_full:
                self._turn_away(connected)
            else:
                live.thread.start()

    def _turn_away(self, connected: socket.socket) -> None:
        """With a reason where no TLS is in the way; a fresh socket takes so few bytes at once."""
        busy = Busy(f"too many bulk connections max={self._connections_max}")
        payload = failure_of(busy).SerializeToString()
        answer = frame(KEEP_ALIVE.number, status_of(busy).number, 1, payload)
        try:
            connected.settimeout(_PAUSE_S)
            if self._tls is None:
                connected.sendall(GREETING + self.address.id + answer)
        except OSError as error:
            log.debug("a bulk connection ended", error=str(error))
        finally:
            connected.close()

    def _serve(self, live: _Live) -> None:
        try:
            live.connected.settimeout(HANDSHAKE_S)
            if self._tls is not None:
                live.connected = self._tls.wrap_socket(live.connected, server_side=True)
            live.peer = BulkSocket(live.connected, self._clock)
            live.calls = BulkCalls(
                live.peer,
                self._daemon,
                self._segments,
                self._clock,
                self._framing,
                self._transit,
            )
            live.calls.greet(GREETING + self.address.id)
            with self._lock:
                live.is_known = True
                self._facts.opened += 1
            live.calls.serve()
        except (KvstoredError, OSError) as error:
            log.debug("a bulk connection ended", error=str(error))
        except Exception:
            log.exception("a bulk connection failed")
        finally:
            live.connected.close()
            if live.calls is not None:
                live.calls.close()
            with self._lock:
                self._live.discard(live)
                self._count(live)
                self._facts.refused += not live.is_known

    def _count(self, live: _Live) -> None:
        if live.peer is None or live.calls is None:
            return
        now = (live.peer.received_bytes, live.peer.sent_bytes, live.calls.failures)
        self._facts.received_bytes += now[0] - live.told[0]
        self._facts.sent_bytes += now[1] - live.told[1]
        self._facts.failures += now[2] - live.told[2]
        live.told = now


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"the bulk channel cannot listen: bulk_listen={host}:{port} error={error.strerror or error}; "
            "give another --bulk-listen, or off"
        ) from error


def _shut(one: socket.socket) -> None:
    """Wakes the thread that waits in it."""
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a socket had ended", error=str(error))
