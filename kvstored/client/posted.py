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
from kvstored.client.lending import Lender, Slots
from kvstored.client.links import Plain, Post
from kvstored.client.local import LocalDataLink
from kvstored.clock import Clock
from kvstored.core.calls import FillStatus
from kvstored.core.hints import Hint
from kvstored.core.types import BATCH_KEYS_MAX
from kvstored.errors import Busy, KvstoredError
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_keys

LINGER_S = 0.002
BATCH_BLOCKS, BATCH_BYTES = 64, 16 << 20
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
    filled: deque[Filled] = field(default_factory=deque)
    blocks: int = 0
    has_ordered: bool = False

    def takes(self, post: Post) -> bool:
        kind = self.plain.namespace, self.hint, self.key_bytes
        is_alike = kind == (post.plain.namespace, post.hint, len(post.keys.keys[0]))
        return is_alike and self.blocks + len(post.keys) <= BATCH_KEYS_MAX

    def share(self, left: int) -> float:
        """Of what one message takes. `left`: places for more; it takes no more than half of all, so that there are some until others come."""
        most = min(BATCH_BLOCKS, BATCH_BYTES // self.plain.block_bytes, (self.blocks + left) // 2)
        return self.blocks / max(most, 1)


class Posts:
    """Of one client in one process; thread-safe, one post after the other. Holds one link from the first post until nothing was posted for a while."""

    def __init__(self, lender: Lender[LocalDataLink], clock: Clock) -> None:
        self._lender = lender
        self._clock = clock
        self._turns = Slots(1)
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
        with _Turn(self._turns, timeout_s), _Sound(self, timeout_s) as link:
            if link.borrowed.session is not post.session or self._is_closed:
                return False
            if self._batch is not None and not self._batch.takes(post):
                self._tell(link, timeout_s)
            filled = link.fill(post, timeout_s)
            self._put_refused(link, timeout_s)
            if filled is None:
                self._order(link, post.plain, len(post.keys), timeout_s)
                return False
            self._add(post, filled)
            self._go_on(link, timeout_s)
            return True

    def flush(self, timeout_s: float) -> Statuses:
        """Waits for all of it; what became of the blocks since the last time. Those of a connection that broke are LOST."""
        with _Turn(self._turns, timeout_s):
            if self._link is not None:
                with _Sound(self, timeout_s) as link:
                    self._finish(link, timeout_s)
            status, self._status = self._status, Statuses()
            return status

    def close(self, timeout_s: float) -> None:
        """Nothing is taken any more; what is on its way is told, if the daemon is there."""
        self._is_closed = True
        # what is lost with the daemon, nobody asks for any more
        with suppress(KvstoredError):
            self.flush(timeout_s)
            with _Turn(self._turns, timeout_s):
                self._let_go()
        self._begun.set()

    # ---- in one's turn

    def sound(self, timeout_s: float) -> LocalDataLink:
        """The link."""
        if self._link is not None and not self._link.borrowed.connection.is_reusable:
            self.drop()
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
            thread = threading.Thread(target=self._run, name="kvstored-posts", daemon=True)
            thread.start()
            self._thread = thread  # not before: where that was interrupted another one starts
        self._begun.set()

    def _go_on(self, link: LocalDataLink, timeout_s: float) -> None:
        """Orders places when a batch is half full: the answer to the one before is there by then, and its own when the batch is full. One that is full
        at once is told first: its order is carried out while the next one is copied."""
        batch = self._batch
        assert batch is not None, "something was added"
        share = batch.share(link.borrowed.stock.left(batch.plain.namespace))
        if share >= 1:
            self._tell(link, timeout_s)
        if share >= 0.5 and not batch.has_ordered:
            batch.has_ordered = True
            self._order(link, batch.plain, batch.blocks, timeout_s)

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
            refused=_raised,
        )

    def _answered(self, link: LocalDataLink, batch: _Batch, answer: pb.PutAsideResponse) -> None:
        self._told.remove(batch)
        if not answer.stored:
            self._refused.append(batch)
            return
        self._status[FillStatus.COMMITTED] += batch.blocks
        link.borrowed.stock.was_used(batch.plain.namespace)

    def _put_refused(self, link: LocalDataLink, timeout_s: float) -> None:
        while self._refused:
            batch = self._refused[0]
            while batch.filled:
                filled = batch.filled[0]
                self._status.update(link.put_again(filled, timeout_s))
                batch.filled.popleft()
                batch.blocks -= len(filled.keys)
            self._refused.popleft()

    def _finish(self, link: LocalDataLink, timeout_s: float) -> None:
        if self._batch is not None:
            self._tell(link, timeout_s)
        link.borrowed.connection.collect()
        self._put_refused(link, timeout_s)

    def drop(self) -> None:
        """The link with its places; what was not answered is lost."""
        if self._link is not None:
            self._link.borrowed.connection.close()
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
            with _Turn(self._turns, threading.TIMEOUT_MAX):
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
            with _Turn(self._turns, threading.TIMEOUT_MAX):
                age_s = LINGER_S
                if self._batch is not None:
                    age_s = self._clock.elapsed_s() - self._batch.begun_s
                wait_s = LINGER_S - age_s
                if wait_s <= 0 and not self._is_done():
                    # what fails is counted as lost, and the next post meets the reason
                    with suppress(KvstoredError), _Sound(self, _TELL_S) as link:
                        self._finish(link, _TELL_S)


class _Sound:
    """The link, in one's turn. What fails or is interrupted ends it: what became of its places is not known, and they may hold blocks that others
    read. Written out, as `Borrowed` is."""

    __slots__ = ("_posts", "_timeout_s")

    def __init__(self, posts: Posts, timeout_s: float) -> None:
        self._posts = posts
        self._timeout_s = timeout_s

    def __enter__(self) -> LocalDataLink:
        return self._posts.sound(self._timeout_s)

    def __exit__(self, failed: type[BaseException] | None, *failure: object) -> None:
        if failed is not None:
            self._posts.drop()


class _Turn:
    """One thread at a time, within a time; an interrupt leaves it to the next."""

    def __init__(self, turns: Slots, timeout_s: float) -> None:
        self._turns = turns
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._slot = self._turns.acquire(self._timeout_s)
        if self._slot is None:
            raise Busy(f"another thread is still posting seconds={self._timeout_s}")

    def __exit__(self, *failure: object) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._turns.release(slot)


def _raised(error: KvstoredError) -> None:
    raise error


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
        places=b"".join([filled.places.ids for filled in batch.filled]),
        checksums=b"".join([filled.checksums for filled in batch.filled]),
    )


def _parents(keys: Keys, nothing: bytes) -> Sequence[bytes]:
    if keys.unchained:
        return [nothing] * len(keys)
    return [keys.parent or nothing, *keys.keys[:-1]]
