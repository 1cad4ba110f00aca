"""Sessions as callers see them: a token, the connections that use it, and how long it outlives the last of them.

Fills, leases and requests hang on the core's session, which ends with this one. Here is no I/O and no clock; `store/writers.py` knows
whether a session's process still lives.
"""

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from kvstored.core.types import SessionId
from kvstored.errors import InvalidArgument, NotFound

TOKEN_BYTES = 16
CLIENT_TEXT_MAX = 200


@dataclass(slots=True)
class Session:
    """`expires_s` is infinite while a connection is tied to it. A detached one has no connections and lives by being used.

    `pid` is the peer's as the kernel told, 0 when unseen.
    """

    token: bytes
    core: SessionId
    client: str
    tenant: str
    pid: int
    resume_ttl_s: float
    is_detached: bool
    expires_s: float
    connections: set[int] = field(default_factory=set)


class Sessions:
    """By token and by connection. Who names a token of another tenant is told that it does not exist."""

    def __init__(self, *, token: Callable[[int], bytes] = secrets.token_bytes) -> None:
        self._token = token
        self._by_token: dict[bytes, Session] = {}
        self._by_core: dict[int, Session] = {}
        self._by_connection: dict[int, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(tuple(self._by_token.values()))

    def add(
        self,
        core: SessionId,
        *,
        client: str,
        tenant: str,
        pid: int,
        resume_ttl_s: float,
        is_detached: bool = False,
        now_s: float,
    ) -> Session:
        """Not yet tied to a connection: it runs out after `resume_ttl_s` unless it is tied or used."""
        session = Session(
            token=self._token(TOKEN_BYTES),
            core=core,
            client=client[:CLIENT_TEXT_MAX],
            tenant=tenant,
            pid=pid,
            resume_ttl_s=resume_ttl_s,
            is_detached=is_detached,
            expires_s=now_s + resume_ttl_s,
        )
        self._by_token[session.token] = session
        self._by_core[int(core)] = session
        return session

    def tie(self, session: Session, connection: int) -> None:
        """It lives at least as long as this connection."""
        session.connections.add(connection)
        session.expires_s = inf
        self._by_connection.setdefault(connection, set()).add(session.token)

    def find(self, token: bytes, *, tenant: str) -> Session | None:
        session = self._by_token.get(token)
        return session if session is not None and session.tenant == tenant else None

    def use(self, token: bytes, *, tenant: str, now_s: float) -> Session:
        """The session behind `token`, whose time begins anew; NotFound when it ended."""
        session = self._by_token.get(token)
        if session is None or session.tenant != tenant:
            if len(token) != TOKEN_BYTES:
                raise InvalidArgument(
                    f"session token has {len(token)} bytes: expected={TOKEN_BYTES}"
                )
            raise NotFound("session ended or never was: open a new one")
        if session.expires_s != inf:
            session.expires_s = now_s + session.resume_ttl_s
        return session

    def of_core(self, core: int) -> Session | None:
        return self._by_core.get(core)

    def of_pid(self, pid: int) -> tuple[Session, ...]:
        return tuple(session for session in self._by_token.values() if session.pid == pid)

    def disconnected(self, connection: int, now_s: float) -> None:
        """The connection is gone: sessions that no other one uses begin to run out."""
        for token in self._by_connection.pop(connection, ()):
            session = self._by_token[token]
            session.connections.discard(connection)
            if not session.connections:
                session.expires_s = now_s + session.resume_ttl_s

    def expired(self, now_s: float) -> tuple[Session, ...]:
        return tuple(s for s in self._by_token.values() if s.expires_s <= now_s)

    def remove(self, session: Session) -> None:
        del self._by_token[session.token]
        del self._by_core[int(session.core)]
        for connection in session.connections:
            tokens = self._by_connection[connection]
            tokens.discard(session.token)
            if not tokens:
                del self._by_connection[connection]
