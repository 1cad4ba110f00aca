"""Puts that nobody waits for: the bytes are copied at once, and what several of them stored is told in one message.

A put of one small block is mostly its message. Here a block is told with those that follow it, or after LINGER_S by a thread that lives while
there is something to tell. What the daemon refuses (a key is known, say) is put again in the usual way, from where its bytes lie.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvstored.client.aside import Filled
from kvstored.client.hints import hint_message
from kvstored.client.keys import Keys
from kvstored.client.lending import Lender
from kvstored.client.links import Plain, Post
from kvstored.client.local import LocalDataLink
from kvstored.clock import Clock
from kvstored.core.calls import FillStatus
from kvstored.core.hints import Hint
from kvstored.errors import Busy, KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_keys, pack_u64

LINGER_S = 0.002
BATCH_BLOCKS, BATCH_BYTES = 64, 8 << 20
_IDLE_S = 2.0
_TELL_S = 10.0
"""For the thread, which has no caller to say how long it may take."""

Statuses = Counter[FillStatus]


@dataclass(slots=True)
class _Batch:
    """What is told in one message: blocks of one kind."""

    plain: Plain
    hint: Hint
    key_bytes: int
    begun_s: float
    filled: list[Filled] = field(default_factory=list)
    blocks: int = 0
    has_ordered: bool = False

    def takes(self, post: Post) -> bool:
        kind = self.plain.namespace, self.hint, self.key_bytes
        return kind == (post.plain.namespace, post.hint, len(post.keys.keys[0]))

    def share(self) -> float:
        """Of what one message takes."""
        return max(self.blocks / BATCH_BLOCKS, self.blocks * self.plain.block_bytes / BATCH_BYTES)


class Posts:
    """Of one client in one process; thread-safe, one post after the other. Holds one link from the first post until nothing was posted for a while."""

    def __init__(self, lender: Lender[LocalDataLink], clock: Clock) -> None:
        self._lender = lender
        self._clock = clock
        self._lock = threading.Lock()
        self._link: LocalDataLink | None = None
        self._batch: _Batch | None = None
        self._told: deque[_Batch] = deque()
        """Whose answers are not there yet."""
        self._refused: deque[_Batch] = deque()
        self._status = Statuses()
        self._thread: threading.Thread | None = None
        self._begun = threading.Event()
        self._is_closed = False

    def post(self, post: Post, timeout_s: float) -> bool:
        """False where it has to be put, with nothing done."""
        with _Held(self._lock, timeout_s):
            link = self._usable(timeout_s)
            if link.borrowed.session is not post.session or self._is_closed:
                return False
            try:
                if self._batch is not None and not self._batch.takes(post):
                    self._tell(link, timeout_s)
                filled = link.fill(post, timeout_s)
                self._put_refused(link, timeout_s)
                if filled is None:
                    self._order(link, post.plain, len(post.keys), timeout_s)
                    return False
                self._add(post, filled)
                self._go_on(link, timeout_s)
            except KvstoredError:
                self._drop_if_broken(link)
                raise
            return True

    def flush(self, timeout_s: float) -> Statuses:
        """Waits for all of it; what became of the blocks since the last time. Those of a connection that broke are LOST."""
        with _Held(self._lock, timeout_s):
            try:
                if self._link is not None:
                    self._finish(self._usable(timeout_s), timeout_s)
            finally:
                status, self._status = self._status, Statuses()
            return status

    def close(self, timeout_s: float) -> None:
        """Nothing is taken any more; what is on its way is told, if the daemon is there."""
        self._is_closed = True
        # what is lost with the daemon, nobody asks for any more
        with suppress(KvstoredError):
            self.flush(timeout_s)
            with _Held(self._lock, timeout_s):
                self._let_go()
        self._begun.set()

    # ---- with the lock

    def _usable(self, timeout_s: float) -> LocalDataLink:
        if self._link is not None:
            self._drop_if_broken(self._link)
        if self._link is None:
            self._link = self._lender.borrow(timeout_s)
        return self._link

    def _add(self, post: Post, filled: Filled) -> None:
        batch = self._batch
        if batch is None:
            key_bytes = len(post.keys.keys[0])
            begun_s = self._clock.elapsed_s()
            batch = self._batch = _Batch(post.plain, post.hint, key_bytes, begun_s)
            self._begin()
        batch.filled.append(filled)
        batch.blocks += len(post.keys)

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvstored-posts", daemon=True)
            self._thread.start()
        self._begun.set()

    def _go_on(self, link: LocalDataLink, timeout_s: float) -> None:
        """Orders places when a batch is half full: the answer to the one before is there by then, and its own when the batch is full."""
        batch = self._batch
        assert batch is not None, "something was added"
        share = batch.share()
        if share >= 0.5 and not batch.has_ordered:
            batch.has_ordered = True
            self._order(link, batch.plain, batch.blocks, timeout_s)
        if share >= 1:
            self._tell(link, timeout_s)

    def _order(self, link: LocalDataLink, plain: Plain, blocks: int, timeout_s: float) -> None:
        stock = link.borrowed.stock
        most = max(1, min(BATCH_BLOCKS, BATCH_BYTES // plain.block_bytes))
        stock.restock(plain.namespace, max(blocks, most), plain.block_bytes, timeout_s)

    def _tell(self, link: LocalDataLink, timeout_s: float) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None, "there is something to tell"
        self._told.append(batch)
        link.borrowed.connection.owe(
            "PutAside",
            _message(batch, link.borrowed.session.token),
            pb.PutAsideResponse,
            partial(self._answered, link, batch),
            timeout_s,
            refused=partial(self._was_refused, batch),
        )

    def _answered(self, link: LocalDataLink, batch: _Batch, answer: pb.PutAsideResponse) -> None:
        if not answer.stored:
            self._was_refused(batch)
            return
        self._told.remove(batch)
        self._status[FillStatus.COMMITTED] += batch.blocks
        link.borrowed.stock.was_used(batch.plain.namespace)

    def _was_refused(self, batch: _Batch) -> None:
        self._told.remove(batch)
        self._refused.append(batch)

    def _put_refused(self, link: LocalDataLink, timeout_s: float) -> None:
        while self._refused:
            batch = self._refused.popleft()
            for i, filled in enumerate(batch.filled):
                try:
                    self._status.update(link.put_again(filled, timeout_s))
                except KvstoredError:
                    left = sum(len(each.keys) for each in batch.filled[i:])
                    self._status[FillStatus.LOST] += left
                    raise

    def _finish(self, link: LocalDataLink, timeout_s: float) -> None:
        try:
            if self._batch is not None:
                self._tell(link, timeout_s)
            link.borrowed.connection.collect()
            self._put_refused(link, timeout_s)
        except KvstoredError:
            self._drop_if_broken(link)
            raise

    def _drop_if_broken(self, link: LocalDataLink) -> None:
        """What was not answered is lost with its places."""
        if link.borrowed.connection.is_reusable:
            return
        lost = [*self._told, *self._refused, *([self._batch] if self._batch else [])]
        self._status[FillStatus.LOST] += sum(batch.blocks for batch in lost)
        self._told.clear()
        self._refused.clear()
        self._batch = None
        self._let_go()

    def _let_go(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._lender.give_back(link)

    # ---- the thread

    def _run(self) -> None:
        while True:
            is_begun = self._begun.wait(_IDLE_S)
            self._begun.clear()
            with self._lock:
                if self._is_closed or (not is_begun and self._is_done()):
                    self._thread = None
                    self._let_go()
                    return
            self._linger()

    def _is_done(self) -> bool:
        return self._batch is None and not self._told and not self._refused

    def _linger(self) -> None:
        """Until what was begun is old enough, then it is told."""
        wait_s = LINGER_S
        while wait_s > 0:
            time.sleep(wait_s)
            with self._lock:
                age_s = LINGER_S
                if self._batch is not None:
                    age_s = self._clock.elapsed_s() - self._batch.begun_s
                wait_s = LINGER_S - age_s
                if wait_s <= 0 and self._link is not None:
                    self._tell_late(self._link)

    def _tell_late(self, link: LocalDataLink) -> None:
        # what fails is counted as lost, and the next post meets the reason
        with suppress(KvstoredError):
            self._finish(link, _TELL_S)


class _Held:
    """A lock within a time."""

    def __init__(self, lock: threading.Lock, timeout_s: float) -> None:
        self._lock = lock
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=self._timeout_s):
            raise Busy(f"another thread is still posting seconds={self._timeout_s}")

    def __exit__(self, *failure: object) -> None:
        self._lock.release()


def _message(batch: _Batch, token: bytes) -> pb.PutAsideRequest:
    names = [key for filled in batch.filled for key in filled.keys.keys]
    packed, key_bytes = pack_keys(names)
    nothing = bytes(key_bytes)
    above = [each for filled in batch.filled for each in _parents(filled.keys, nothing)]
    contents = [each for filled in batch.filled for each in filled.keys.content_keys]
    reserve = pb.ReserveRequest(
        session=token,
        namespace=batch.plain.namespace,
        keys=pb.Keys(packed=packed, key_bytes=key_bytes, parents=b"".join(above)),
        ends_path=True,
        hint=hint_message(batch.hint),
        content_keys=b"".join(contents) if len(contents) == len(names) else b"",
    )
    return pb.PutAsideRequest(
        reserve=reserve,
        places=b"".join([filled.places.ids.tobytes() for filled in batch.filled]),
        checksums=pack_u64([each for filled in batch.filled for each in filled.checksums]),
    )


def _parents(keys: Keys, nothing: bytes) -> Sequence[bytes]:
    if keys.unchained:
        return [nothing] * len(keys)
    return [keys.parent or nothing, *keys.keys[:-1]]
