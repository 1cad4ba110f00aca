"""The catalog against a dumb oracle, after every step of a random life; nothing is left when it ends.

Capacities are one to three blocks, so that every call meets a full tier. A failure tells its seed; KVSTORED_MODEL_SEED repeats
a run, KVSTORED_MODEL_EXAMPLES makes it longer.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from kvstored.core.calls import Reason, TierLimits
from kvstored.core.types import GroupKind, GroupSpec, NamespaceId, SessionId, TierId
from kvstored.core.usage import blocks_in
from kvstored.errors import NoSpace, NotFound
from tests.core.catalog_asides import AsideMachine
from tests.core.catalog_compare import Profile
from tests.core.catalog_machine import small
from tests.core.desk import (
    BLOB,
    BLOCK_TOKENS,
    LINEAR,
    SHARDED,
    SHARDED_STATE,
    SPARSE,
    STATE,
    UNIT,
    WINDOW,
    freed_in,
    remove,
    spec_of,
)
from tests.core.oracle_rows import DRAM, NVME

SEED = int(os.environ.get("KVSTORED_MODEL_SEED", random.SystemRandom().randrange(1 << 32)))
EXAMPLES = int(os.environ.get("KVSTORED_MODEL_EXAMPLES", "40"))
STEPS = 40


def tier(tier: TierId, units: int, **shares: float) -> TierLimits:
    return TierLimits(tier, units, **{"high": 0.9, "low": 0.5, "aside_share": 1.4, **shares})  # type: ignore[arg-type]  # admit_hits is an int


PLAIN = spec_of("plain")
WIDE = spec_of("wide", GroupSpec("kv", GroupKind.LINEAR, 2 * UNIT))
SINKS = spec_of("sinks", LINEAR, sink_tokens=BLOCK_TOKENS)
MUTABLE = spec_of("mutable", LINEAR, mutable=True)
HYBRID = spec_of("hybrid", LINEAR, SPARSE, STATE, WINDOW)
SHARDS = spec_of("shards", LINEAR, SHARDED, SHARDED_STATE, BLOB, tp=2)
BLOBS = spec_of("blobs", SPARSE, BLOB, LINEAR, STATE, sink_tokens=1)

PROFILES = {
    "linear": Profile(
        (PLAIN, MUTABLE),
        tuple(tier(DRAM, units) for units in (1, 2, 3, 6)),
        tuple(tier(NVME, units) for units in (1, 2, 5)),
    ),
    "wide": Profile(
        (WIDE, PLAIN),
        tuple(tier(DRAM, units) for units in (4, 7)),
        tuple(tier(NVME, units) for units in (4, 10)),
    ),
    "sinks": Profile(
        (SINKS, PLAIN),
        tuple(tier(DRAM, units, sink_share=0.4, pin_share=1.0) for units in (3, 5)),
        (tier(NVME, 4, admit_hits=1, sink_share=0.3),),
    ),
    "hybrid": Profile(
        (HYBRID,),
        tuple(tier(DRAM, units, checkpoint_share=0.5, lease_share=1.0) for units in (6, 10)),
        tuple(tier(NVME, units, checkpoint_share=0.4) for units in (4, 10)),
    ),
    "shards": Profile(
        (SHARDS, PLAIN),
        tuple(tier(DRAM, units, checkpoint_share=0.4, lease_share=0.9) for units in (6, 9, 14)),
        (tier(NVME, 7, checkpoint_share=0.4),),
    ),
    "all": Profile(
        (PLAIN, HYBRID, SHARDS, BLOBS, SINKS, MUTABLE),
        (
            tier(DRAM, 14, checkpoint_share=0.5, sink_share=0.2),
            tier(DRAM, 30, checkpoint_share=0.4),
        ),
        (tier(NVME, 20, checkpoint_share=0.3, admit_hits=2), tier(NVME, 60)),
    ),
}


class WholeMachine(AsideMachine):
    """Claims, removal, sessions, time, and the end."""

    # ---- claims

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, path=small, length=small, hard=st.booleans(), ttl=small)
    def pin(self, ns: int, path: int, length: int, hard: bool, ttl: int) -> None:
        namer, keys = self.pick(self.namers, ns), self.path(path, length)
        ttl_s = float(1 + ttl % 40)
        blocks, units, fits = self.oracle.pin(namer.layout.id, keys)

        def pin() -> int:
            pinned = self.catalog.pin(
                self.sessions[0],
                namer.layout.id,
                namer.batch(keys),
                hard=hard,
                ttl_s=ttl_s,
                now_s=self.now_s,
            )
            assert (pinned.blocks, pinned.bytes) == (len(blocks), units * UNIT)
            return pinned.pin

        if fits:
            self.oracle.add_pin(pin(), blocks, hard, self.now_s + ttl_s)
        else:
            with pytest.raises(NoSpace):
                pin()
        self.compare()

    @precondition(lambda self: self.is_begun and self.oracle.pins)
    @rule(pick=small)
    def unpin(self, pick: int) -> None:
        id_ = self.pick(sorted(self.oracle.pins), pick)
        assert self.catalog.unpin(id_, self.now_s)
        assert self.oracle.unpin(id_)
        assert not self.catalog.unpin(id_, self.now_s)
        self.compare()

    @precondition(lambda self: self.is_begun)
    @rule(
        session=small,
        ns=small,
        path=small,
        length=small,
        name=st.sampled_from((b"r1", b"r2")),
        discard=st.booleans(),
        extend=small,
    )
    def request(
        self, session: int, ns: int, path: int, length: int, name: bytes, discard: bool, extend: int
    ) -> None:
        session, namer = self.pick(self.sessions, session), self.pick(self.namers, ns)
        keys, at = self.path(path, length), (session, name)
        request = self.oracle.requests.get(at)
        if request is None:
            with pytest.raises(NotFound):
                self.catalog.complete_request(session, name, discard, self.now_s)
            self.catalog.begin_request(
                session, name, namer.layout.id, namer.batch(keys), self.now_s
            )
            self.oracle.begin_request(at, namer.layout.id, keys)
        elif extend % 3:
            batch = self.namer_of(request.ns).batch(keys)
            sealed = self.catalog.extend_request(session, name, batch, self.now_s)
            assert sealed == self.oracle.seal(request, self.oracle.run(request.ns, keys))
        else:
            dropped = self.catalog.complete_request(session, name, discard, self.now_s)
            assert dropped == self.oracle.complete_request(at, discard=discard)
        self.compare()

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, path=small, length=small)
    def touch(self, ns: int, path: int, length: int) -> None:
        namer, keys = self.pick(self.namers, ns), self.path(path, length)
        touched = self.catalog.touch(namer.layout.id, namer.batch(keys), self.now_s)
        blocks = [self.oracle.blocks.get((namer.layout.id, key)) for key in keys]
        readable = [block for block in blocks if block and self.oracle.is_readable(block)]
        self.oracle.touch(readable, hit=False, now_s=self.now_s)
        assert touched == len(readable)
        self.compare()

    # ---- forgetting

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, path=small, length=small, last=st.booleans())
    def remove(self, ns: int, path: int, length: int, last: bool) -> None:
        namer, keys = self.pick(self.namers, ns), self.path(path, length)
        keys = keys[-1:] if last else keys
        removed = remove(self.catalog, namer.layout.id, namer.batch(keys), self.now_s)
        blocks = [self.oracle.blocks.get((namer.layout.id, key)) for key in keys]
        there = [block for block in blocks if block is not None]
        assert removed == self.oracle.drop_all(there, Reason.REMOVED)
        self.compare()

    @precondition(lambda self: self.is_begun)
    @rule(ns=small, how=st.integers(0, 11))
    def forget_namespace(self, ns: int, how: int) -> None:
        layout = self.pick(self.namers, ns).layout
        mine = [block for block in self.oracle.blocks.values() if block.ns == layout.id]
        if how < 3:
            self.catalog.retire(layout.id)
            self.oracle.retire(layout.id)
        elif how < 8:
            self.catalog.add_namespace(layout)
            self.oracle.retired.discard(layout.id)
        elif how < 10:
            removed = self.catalog.clear_rows(
                layout.id, blocks_in(self.catalog.books, layout.id), self.now_s
            )
            assert removed == self.oracle.drop_all(mine, Reason.REMOVED)
        else:
            self.oracle.retired.add(layout.id)
            removed = self.catalog.remove_namespace(layout.id, self.now_s)
            assert removed == self.oracle.drop_all(mine, Reason.REMOVED)
        self.compare()

    @precondition(lambda self: self.is_begun and self.oracle.blocks)
    @rule(pick=small, copy=small)
    def corrupt(self, pick: int, copy: int) -> None:
        block = self.pick(list(self.oracle.blocks.values()), pick)
        if not block.copies:
            return
        at = copy % len(block.copies)
        fingerprint = self.fingerprint_of(block.ns, block.key)
        row = self.catalog.looking.copies_of(NamespaceId(block.ns), fingerprint)[at]
        self.catalog.drop_copy(row, Reason.CORRUPT, self.now_s)
        self.oracle.drop(block.copies[at], Reason.CORRUPT)
        self.compare()

    # ---- sessions and time

    @precondition(lambda self: self.is_begun)
    @rule(pick=small, dead=st.booleans())
    def close_session(self, pick: int, dead: bool) -> None:
        session = self.pick(self.sessions, pick)
        self.catalog.close_session(session, self.now_s, writer_dead=dead)
        self.oracle.close_session(session, dead=dead)
        assert self.catalog.quarantine.has(session) == any(
            kept.session == session for kept in self.oracle.kept
        )
        self.compare()
        self.sessions[self.sessions.index(session)] = self.catalog.open_session(self.now_s)

    @precondition(lambda self: self.is_begun and self.oracle.kept)
    @rule(pick=small)
    def writer_dead(self, pick: int) -> None:
        session = self.pick(self.oracle.kept, pick).session
        self.catalog.quarantine.writer_dead(SessionId(session))
        self.oracle.writer_dead(session)
        self.compare()

    @precondition(lambda self: self.is_begun)
    @rule(seconds=st.sampled_from((0.5, 3.0, 11.0, 30.0)))
    def time_passes(self, seconds: float) -> None:
        self.oracle.now_s += seconds
        self._expire()

    def _expire(self) -> None:
        is_due = self.catalog.next_expiry_s() <= self.now_s
        expired = self.catalog.expire(self.now_s)
        found = expired.fills, expired.leases, expired.pins, expired.copies
        before = len(self.oracle.kept)
        expected = self.oracle.expire()
        assert found == expected
        assert is_due or (not any(found) and before == len(self.oracle.kept))
        assert self.catalog.next_expiry_s() > self.now_s
        self.compare()

    def teardown(self) -> None:
        """Everything ends; nothing is left: no row, no unit."""
        if not self.is_begun:
            return
        for session in list(self.sessions):
            self.catalog.close_session(session, self.now_s, writer_dead=False)
            self.oracle.close_session(session, dead=False)
        while self.tasks:
            self.end_task(0, 1, trim=False)
        self.oracle.now_s += 1000.0
        self._expire()
        for namer in self.namers:
            rows = blocks_in(self.catalog.books, namer.layout.id)
            self.catalog.clear_rows(namer.layout.id, rows, self.now_s)
        freed = freed_in(self.catalog.drain())
        self.discards += [(effect.token, 0) for effect in freed if effect.token]
        for token, _ in self.discards:
            self.catalog.discarded(token)
        self.catalog.check()
        books = self.catalog.books
        assert self.catalog.blocks == books.copies.live == books.pieces.live == 0
        assert not any(
            self.catalog.counts[name] for name in ("fills", "asides", "leases", "pins", "tasks")
        )
        for book in books.space.books.values():
            assert book.extents.free_units == book.extents.capacity_units


@pytest.mark.timeout(600)  # shrinking a failure takes its time
@pytest.mark.parametrize("by_columns", [True, False], ids=["columns", "blocks"])
@pytest.mark.parametrize("name", PROFILES)
def test_the_catalog_does_what_the_oracle_says(
    name: str, by_columns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    print(f"KVSTORED_MODEL_SEED={SEED}")  # noqa: T201 - shown with a failure
    if by_columns:  # whatever can be; else block by block
        monkeypatch.setattr("kvstored.core.plain.PLAIN_MIN", 1)
        monkeypatch.setattr("kvstored.core.plain_reads.PLAIN_MIN", 1)
        monkeypatch.setattr("kvstored.core.carriage.PLAIN_MIN", 1)
        monkeypatch.setattr("kvstored.core.write_back.RUN_MIN", 1)
        monkeypatch.setattr("kvstored.core.leaving.MANY", 1)
    machine = type(f"Machine_{name}", (WholeMachine,), {"profile": PROFILES[name]})
    run_state_machine_as_test(
        seed(SEED)(machine),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
