"""Sessions: a token outlives its connections for a while, and belongs to one tenant."""

from math import inf

import pytest

from kvstored.core.types import SessionId
from kvstored.errors import InvalidArgument, NotFound
from kvstored.store.sessions import Session, Sessions


def opened(
    sessions: Sessions, core: int = 1, connection: int = 10, tenant: str = "default"
) -> Session:
    session = sessions.add(
        SessionId(core), client="engine", tenant=tenant, pid=1, resume_ttl_s=30.0, now_s=100.0
    )
    if connection:
        sessions.tie(session, connection)
    return session


def test_a_session_runs_out_only_after_its_last_connection() -> None:
    sessions = Sessions()
    session = opened(sessions)
    sessions.tie(session, 11)
    sessions.disconnected(10, 200.0)
    assert session.expires_s == inf
    sessions.disconnected(11, 300.0)
    assert sessions.expired(329.0) == ()
    assert sessions.expired(330.0) == (session,)


def test_a_returning_connection_revives_it() -> None:
    sessions = Sessions()
    session = opened(sessions)
    sessions.disconnected(10, 200.0)
    sessions.tie(session, 12)
    assert sessions.expired(1e9) == ()


def test_a_detached_session_lives_by_being_used() -> None:
    sessions = Sessions()
    session = opened(sessions, connection=0)
    assert sessions.use(session.token, tenant="default", now_s=125.0) is session
    assert sessions.expired(154.0) == ()
    assert sessions.expired(155.0) == (session,)


def test_tokens_of_other_tenants_ended_sessions_and_odd_lengths_are_refused() -> None:
    sessions = Sessions()
    session = opened(sessions)
    with pytest.raises(NotFound):
        sessions.use(session.token, tenant="other", now_s=100.0)
    assert sessions.find(session.token, tenant="other") is None
    with pytest.raises(InvalidArgument):
        sessions.use(b"short", tenant="default", now_s=100.0)
    sessions.remove(session)
    with pytest.raises(NotFound):
        sessions.use(session.token, tenant="default", now_s=100.0)
    assert len(sessions) == 0
    sessions.disconnected(10, 1.0)


def test_one_connection_may_carry_many_sessions() -> None:
    sessions = Sessions()
    first, second = opened(sessions, 1), opened(sessions, 2)
    sessions.disconnected(10, 0.0)
    assert {s.core for s in sessions.expired(30.0)} == {first.core, second.core}
