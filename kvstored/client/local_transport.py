"""What the links of one client to the daemon on its own host share: the channel, the mapped segments, the copying threads."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from kvstored.client.channel import LocalChannel, LocalLink
from kvstored.client.copying import Copier
from kvstored.client.gpu import Pools
from kvstored.client.keys import Keys
from kvstored.client.lending import Borrowed
from kvstored.client.links import GetCall, Post
from kvstored.client.local import LocalDataLink
from kvstored.client.optimistic import Optimistic
from kvstored.client.parts import LINKS, got_in_turns, within
from kvstored.client.posted import Posts
from kvstored.client.reports import Reports
from kvstored.client.results import GetResult, OptimisticReads
from kvstored.client.segments import Segments
from kvstored.core.calls import FillStatus
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb

_TELL_S = 2.0


class LocalTransport:
    """The local channel, the mapped segments and the copying threads of one client in one process."""

    def __init__(self, channel: LocalChannel, copy_threads: int) -> None:
        self._channel = channel
        self._segments = Segments()
        self._pools = Pools()
        self._copier = Copier(copy_threads)
        self._optimistic = Optimistic(self._segments, self._copier, Reports(self._tell_read))
        self._posts = Posts(self, channel.clock)

    def link(self, timeout_s: float) -> AbstractContextManager[LocalDataLink]:
        return Borrowed(self, timeout_s)

    def borrow(self, timeout_s: float) -> LocalDataLink:
        link = self._channel.borrow(timeout_s)
        try:
            return self._lent(link)
        except BaseException:
            self._channel.give_back(link)
            raise

    def get_each(
        self, link: LocalDataLink, calls: Sequence[GetCall], timeout_s: float
    ) -> list[GetResult]:
        others: list[LocalLink] = []
        try:
            while len(others) < LINKS - 1 and (another := self._another(timeout_s)) is not None:
                others.append(another)
            # of another session where the daemon was just restarted
            links = [link, *(self._lent(each) for each in others if each.session is link.session)]
            return got_in_turns(links, within(calls, self._channel.clock), timeout_s)
        finally:
            for each in others:
                self._channel.give_back(each)

    def _another(self, timeout_s: float) -> LocalLink | None:
        """None where there is none to be had, for want of descriptors say: one will do."""
        try:
            return self._channel.borrow_another(timeout_s)
        except KvstoredError:
            return None

    def _lent(self, link: LocalLink) -> LocalDataLink:
        return LocalDataLink(
            link,
            self._segments,
            self._pools,
            self._copier,
            self._channel.clock,
            self._optimistic,
            self.get_each,
        )

    def give_back(self, lent: LocalDataLink) -> None:
        self._channel.give_back(lent.borrowed)

    def post(self, post: Post, timeout_s: float) -> bool:
        return self._posts.post(post, timeout_s)

    def flush(self, timeout_s: float) -> Counter[FillStatus]:
        return self._posts.flush(timeout_s)

    def optimistic_reads(self) -> OptimisticReads:
        return replace(self._optimistic.reads, untold=self._optimistic.reports.untold)

    def close(self) -> None:
        self._posts.close(_TELL_S)
        self._optimistic.reports.close()
        self._channel.close()
        self._segments.clear()
        self._pools.clear()
        self._copier.close()

    def forked(self) -> None:
        self._channel.forked()

    def _tell_read(self, digest: bytes, keys: Sequence[bytes]) -> None:
        message = Keys(tuple(keys), unchained=True).message()
        with self._channel.link(_TELL_S) as link:
            session = link.session.token
            request = pb.TouchRequest(session=session, namespace=digest, keys=message, read=True)
            link.call("Touch", request, pb.TouchResponse, _TELL_S)
