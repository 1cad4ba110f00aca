"""Callers' sessions over their life: opened, resumed, run out, closed, and what becomes of space when a writer's process dies."""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvstored.core.types import SessionId
from kvstored.store.sessions import Session, Sessions
from kvstored.store.shell import Shell
from kvstored.store.writers import Writers

RESUME_TTL_S_MAX = 3600.0
EARLIER = SessionId(0)
"""The catalog's session of rights from before the restart."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end of a connection."""

    connection: int
    pid: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller asks of its session; `resume_ttl_s` 0 for the default. Detached: lives by being used, not by its connection."""

    client: str = ""
    resume_token: bytes = b""
    resume_ttl_s: float = 0.0
    is_detached: bool = False


@dataclass(frozen=True, slots=True)
class _Closed:
    """A session that ended while its process lived: its space may be in quarantine."""

    core: SessionId
    pid: int
    forget_s: float


class Clients:
    def __init__(self, shell: Shell, *, resume_ttl_s: float, quarantine_s: float) -> None:
        self._shell = shell
        self._resume_ttl_s = resume_ttl_s
        self._quarantine_s = quarantine_s
        self.sessions = Sessions()
        self.writers = Writers(self._died)
        self._closed: list[_Closed] = []
        self._orphans: set[int] = set()

    def open(self, peer: Peer, wish: Wish) -> tuple[Session, bool]:
        """A new session, or the one that `resume_token` names while it lives (then True): a token that has ended is no error."""
        found = self.sessions.find(wish.resume_token, tenant=peer.tenant)
        session = found or self._opened(peer, wish)
        if not wish.is_detached:
            self.sessions.tie(session, peer.connection)
        return session, found is not None

    def _opened(self, peer: Peer, wish: Wish) -> Session:
        now_s = self._shell.now_s()
        core = self._shell.catalog.open_session(now_s)
        self._shell.apply()
        self.writers.watch(peer.pid)
        return self.sessions.add(
            core,
            client=wish.client,
            tenant=peer.tenant,
            pid=peer.pid,
            resume_ttl_s=min(wish.resume_ttl_s or self._resume_ttl_s, RESUME_TTL_S_MAX),
            is_detached=wish.is_detached,
            now_s=now_s,
        )

    def use(self, token: bytes, *, tenant: str) -> Session:
        return self.sessions.use(token, tenant=tenant, now_s=self._shell.now_s())

    def close(self, session: Session) -> None:
        """End it in good order or because it ran out. Its process may still write: what it had open goes to quarantine."""
        is_dead = self.writers.is_dead(session.pid)
        self.sessions.remove(session)
        now_s = self._shell.now_s()
        self._shell.catalog.close_session(session.core, now_s, writer_dead=is_dead)
        self._shell.apply()
        if not is_dead and session.pid:
            forget_s = now_s + self._quarantine_s + 1.0
            self._closed.append(_Closed(session.core, session.pid, forget_s))

    def disconnected(self, connection: int) -> None:
        self.sessions.disconnected(connection, self._shell.now_s())

    def expire(self) -> int:
        """Close the sessions whose connections did not come back; stop watching processes that hold nothing here any more."""
        now_s = self._shell.now_s()
        expired = self.sessions.expired(now_s)
        for session in expired:
            self.close(session)
        self._closed = [closed for closed in self._closed if closed.forget_s > now_s]
        needed = {session.pid for session in self.sessions} | {c.pid for c in self._closed}
        for pid in self.writers.watched() - needed - self._orphans:
            self.writers.forget(pid)
        return len(expired)

    def adopt(self, writers: AbstractSet[int]) -> None:
        """Processes that were writing when an earlier daemon died: when the last is dead, the space kept for them is free.

        One that cannot be seen (0) leaves it to the catalog's timer.
        """
        if not writers or 0 in writers:
            return
        self._orphans = {pid for pid in writers if self.writers.watch(pid)}
        if any(not self.writers.is_gone(pid) for pid in writers - self._orphans):
            self._orphans = set()
        elif not self._orphans:
            self._end_writers([EARLIER])

    def stop_watching(self) -> None:
        self.writers.close()

    def _died(self, pid: int) -> None:
        """The process ended: nothing of it can write any more, its sessions need not wait for their connections."""
        now_s = self._shell.now_s()
        for session in self.sessions.of_pid(pid):
            self.sessions.remove(session)
            self._shell.catalog.close_session(session.core, now_s, writer_dead=True)
            self._shell.apply()
        self._end_writers([closed.core for closed in self._closed if closed.pid == pid])
        self._closed = [closed for closed in self._closed if closed.pid != pid]
        if pid in self._orphans:
            self._orphans.discard(pid)
            if not self._orphans:
                self._end_writers([EARLIER])

    def _end_writers(self, sessions: list[SessionId]) -> None:
        for core in sessions:
            self._shell.catalog.quarantine.writer_dead(core)
            self._shell.apply()
