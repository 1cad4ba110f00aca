"""The calls of one open namespace."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from kvstored.client.channel import Session
from kvstored.client.keys import Keys, checked
from kvstored.client.links import (
    Aside,
    GetCall,
    Glance,
    Leased,
    Linked,
    Plain,
    Post,
    PutPart,
    Said,
    milliseconds,
)
from kvstored.client.namespace_calls import NamespaceCalls
from kvstored.client.optimistic import seed_if_shown
from kvstored.client.parts import completed, cut, merged
from kvstored.client.results import GetResult, OpenedNamespace, PutResult
from kvstored.client.rows import (
    Rows,
    Selection,
    Sized,
    parts_of,
    selection_of,
    sizes_of,
    sources_of,
    worth_storing,
)
from kvstored.client.scatter import BufferRow, Ranges, gathers_of, ranges_of, scattered
from kvstored.client.view import View
from kvstored.core.hints import NO_HINT, Hint
from kvstored.errors import KvstoredError, LeaseLost
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_u64

Piece = TypeVar("Piece", bound=Sized)


class Namespace(NamespaceCalls):
    """A namespace of one client: thread-safe, and open again by itself after the daemon was restarted.

    Times out like the client unless `timeout_s` is given. Where a call takes keys, at most 4,096.
    """

    def __init__(self, client: Linked, facts: OpenedNamespace, session: Session) -> None:
        super().__init__(client, facts, session)
        self._seed = seed_if_shown(self.digest, self.spec)
        self._required = selection_of(self.spec, None)
        self._block_bytes = sum(group.bytes_per_block for group in self.spec.groups)
        full_bytes = self.spec.groups[0].bytes_per_block
        self._full = None if self._seed is None else Plain(self.digest, self._seed, full_bytes)

    # ---- bytes

    def put(
        self,
        keys: Keys,
        rows: Rows,
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ends_path: bool = True,
        request_id: bytes = b"",
        fill_ttl_s: float = 0,
        hint: Hint = NO_HINT,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Stores one row of arrays a key; visible block by block, each whole or not at all.

        `groups`: the groups that the rows hold, in namespace order; the required ones unless given. `ends_path`: a prompt or an output
        ends at the last key, which is where the `boundary` policy has its checkpoint. Window and state arrays that no future hit can
        consume are left out. `hint`: what is known of the request that they are of. The timeout bounds each message, not the copying. An
        exception leaves nothing of the running part behind.
        """
        selection = self._selection(groups)
        given = sources_of(rows, keys, selection)
        sources = worth_storing(given, self.spec, selection, keys, ends_path=ends_path)
        said = Said(shard, ends_path, request_id, fill_ttl_s, hint)
        parts = [
            PutPart(request, mine, count, None, (), aside)
            for request, mine, count, aside in self._parts(keys, sources, selection, said)
        ]
        if not parts:
            return PutResult(())
        wait_s = self._timeout_s(timeout_s)
        with self._client.link(
            timeout_s
        ) as link:  # not _link: its generator costs a few microseconds
            self._open_in(link, wait_s)
            return PutResult(tuple(link.put(parts, wait_s)))

    def post(
        self, keys: Keys, rows: Rows, *, hint: Hint = NO_HINT, timeout_s: float | None = None
    ) -> None:
        """As `put`, without waiting for what becomes of it: the arrays may change as soon as this returns, and `Client.flush` tells.

        On the daemon's host the blocks are readable, by this client too, within a few milliseconds, or after `flush`; what is lost with the
        daemon, or with this process, until then was never stored. Blocks that need more than a copy (partial ones, several groups, no room yet) are
        put, and so are all of a daemon elsewhere.
        """
        sources = sources_of(rows, keys, self._required)
        plain = None if keys.extra_keys else self._plain(keys, sizes_of(sources))
        wait_s = self._timeout_s(timeout_s)
        if plain is not None and keys:
            whole = [source for source in sources if source is not None]
            post = Post(self._opened_in, plain, keys, whole, hint)
            if self._client.may_post(post, wait_s):
                return
        self._client.posted(self.put(keys, rows, hint=hint, timeout_s=wait_s).status)

    def put_from(
        self,
        keys: Keys,
        buffers: Sequence[BufferRow],
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ends_path: bool = True,
        request_id: bytes = b"",
        fill_ttl_s: float = 0,
        hint: Hint = NO_HINT,
        timeout_s: float | None = None,
    ) -> PutResult:
        """As `put`, of blocks that lie in several arrays each: one list of arrays a key, in the order of the piece's bytes, strided or not.

        They go to the daemon's memory without being joined first; from another host they are joined, 64 MiB at a time.
        """
        selection = self._selection(groups)
        given = gathers_of(buffers, len(checked(keys)), len(selection.groups), writable=False)
        gathers = worth_storing(given, self.spec, selection, keys, ends_path=ends_path)
        said = Said(shard, ends_path, request_id, fill_ttl_s, hint)
        parts = [
            PutPart(request, (), count, None, mine, aside)
            for request, mine, count, aside in self._parts(keys, gathers, selection, said)
        ]
        if not parts:
            return PutResult(())
        wait_s = self._timeout_s(timeout_s)
        with self._link(timeout_s) as link:
            if link.shares_memory:
                return PutResult(tuple(link.put(parts, wait_s)))
            return PutResult(
                tuple([s for part in parts for s in link.put([part.joined()], wait_s)])
            )

    def replace_if(
        self,
        keys: Keys,
        rows: Rows,
        generations: Sequence[int],
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        timeout_s: float | None = None,
    ) -> PutResult:
        """Replaces blocks of a mutable namespace if all still have these generations (0: absent), else raises Conflict."""
        selection = self._selection(groups)
        sources = sources_of(rows, keys, selection)
        request = pb.ReserveRequest()
        self._ask(request, keys, sizes_of(sources), selection, Said(shard))
        part = PutPart(request, sources, len(keys), generations)
        with self._link(timeout_s) as link:
            return PutResult(tuple(link.put([part], self._timeout_s(timeout_s))))

    def get(
        self,
        keys: Keys,
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        out: Rows | None = None,
        verify: bool = True,
        optimistic: bool | None = None,
        wait: bool = True,
        exact: bool = False,
        load_deadline_s: float = 0,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Private copies of what is there. `out`: writable arrays to copy into instead of new ones; what they hold counts for hits only.

        `verify=False` skips the checksum of what is leased, where the daemon allows that, and asks instead whether the lease held. `wait=False`
        takes what is in DRAM now; the rest is PENDING, loads on, and ends in a LOADED or LOAD_FAILED event. `optimistic`: whether
        reads may go without a message, which are always hashed (docs/api.md); as the client says unless given. `exact`: blocks that are near what was put
        and not equal, which `lossy` of the result tells, are misses.
        """
        wait_s = self._timeout_s(timeout_s)

        def call_of(glance: Glance) -> GetCall:
            call = self._acquire(glance.keys, groups, shard, wait, load_deadline_s, 0, exact=exact)
            return replace(call, out=glance.out, verify=verify)

        def acquired(glance: Glance) -> GetResult:
            # what could not be seen is not in memory: it is read in parts where it is much
            may_load = may and wait and link.shares_memory
            parts = cut(len(glance.keys), self._block_bytes if may_load else 0)
            if len(parts) == 1:
                return link.get(call_of(glance), wait_s)
            calls = [call_of(glance.part(part)) for part in parts]
            return merged(list(zip(parts, link.get_each(calls, wait_s), strict=True)))

        glance = Glance(self.digest, self._seed or 0, checked(keys), out)
        may = self._may_glance(keys, groups, shard, optimistic)
        with self._client.link(timeout_s) as link:
            self._open_in(link, wait_s)
            seen = link.glance(glance, wait_s) if may else None
            return completed(glance, seen, acquired)

    def get_into(
        self,
        keys: Keys,
        buffers: Sequence[BufferRow],
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ranges: Ranges | None = None,
        verify: bool = True,
        optimistic: bool | None = None,
        wait: bool = True,
        exact: bool = False,
        load_deadline_s: float = 0,
        timeout_s: float | None = None,
    ) -> GetResult:
        """As `get`, into several writable arrays a block: one list a key, whose bytes are exactly those of the piece, in its order.

        `ranges`: only these bytes of every piece, a run of layers say; a buffer ends where a range does. With `verify` the rest is hashed
        in place, without it nothing else is read. `filled` tells which pieces came; buffers of the others hold anything. Raises
        InvalidArgument before the first byte is copied where sizes do not match. From another host whole pieces travel, and are copied once more.
        """
        selection = self._selection(groups)
        gathers = gathers_of(buffers, len(checked(keys)), len(selection.groups), writable=True)
        wanted = ranges_of(ranges)
        wait_s = self._timeout_s(timeout_s)
        glance = Glance(self.digest, self._seed or 0, keys, None, gathers, wanted)
        may = (verify or ranges is None) and self._may_glance(keys, groups, shard, optimistic)
        with self._client.link(timeout_s) as link:
            self._open_in(link, wait_s)
            seen = link.glance(glance, wait_s) if may and link.shares_memory else None
            if seen is not None:
                return seen
            call = self._acquire(keys, groups, shard, wait, load_deadline_s, 0, exact=exact)
            if link.shares_memory:
                into = replace(call, verify=verify, gathers=gathers, ranges=wanted)
                return link.get(into, wait_s)
            found = link.get(replace(call, verify=verify), wait_s)
        return scattered(found, gathers, wanted)

    def get_view(
        self,
        keys: Keys,
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ttl_s: float = 0,
        verify: bool = False,
        wait: bool = True,
        exact: bool = False,
        load_deadline_s: float = 0,
        timeout_s: float | None = None,
    ) -> View:
        """Blocks in place, without a copy, under a lease of `ttl_s` (0: the daemon's default). Leave it by `with` or `release`."""
        call = self._acquire(keys, groups, shard, wait, load_deadline_s, ttl_s, exact=exact)
        with self._link(timeout_s) as link:
            full = GetCall(call.request, call.keys, call.groups, None, verify)
            leased = link.lease(full, self._timeout_s(timeout_s))
        return View(leased, release=self._released, renew=self._renewed)

    def map_gpu(
        self,
        keys: Keys,
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ttl_s: float = 0,
        exact: bool = False,
        layers: int = 0,
        load_deadline_s: float = 0,
        timeout_s: float | None = None,
    ) -> View:
        """Blocks in the daemon's GPU memory, brought there first where they lie elsewhere, under a lease as of `get_view`: CuPy arrays that
        PyTorch and JAX take as they are. Required groups only.

        `layers`: every piece holds so many in equal parts; the view is there as soon as copies from DRAM are on their way, in the order of layers, and
        only what `view.wait_layers` has answered for may be read.

        Leaving the view waits for the whole GPU to be done with what this process asked of it. Nothing can keep another process from
        writing to mapped GPU memory, so write to none of it. Unavailable where there is no such tier or it is not shared with this
        process: read from DRAM then.
        """
        call = self._acquire(keys, groups, shard, True, load_deadline_s, ttl_s, exact=exact)
        with self._link(timeout_s) as link:
            call.request.layers = layers
            leased = link.lease_on_gpu(call, self._timeout_s(timeout_s))
        return View(leased, release=self._released, renew=self._renewed, wait=self._waited)

    # ---- inside

    def _may_glance(
        self, keys: Keys, groups: Sequence[str] | None, shard: int, optimistic: bool | None
    ) -> bool:
        may = self._client.optimistic if optimistic is None else optimistic
        return may and self._seed is not None and not (keys.extra_keys or shard or groups)

    def _selection(self, groups: Sequence[str] | None) -> Selection:
        return self._required if groups is None else selection_of(self.spec, groups)

    def _parts(
        self, keys: Keys, pieces: list[Piece | None], selection: Selection, said: Said
    ) -> Iterator[tuple[pb.ReserveRequest, list[Piece | None], int, Aside | None]]:
        """A put in parts: how each is asked for, its pieces, its keys, and how it is told where it is plain."""
        g, sizes = len(selection.groups), sizes_of(pieces)
        for a, b in parts_of(sizes, g):
            some, theirs = keys[a:b], sizes[a * g : b * g]
            plain = self._plain(some, theirs)
            aside = None if plain is None else Aside(plain, pb.PutAsideRequest())
            request = pb.ReserveRequest() if aside is None else aside.request.reserve
            self._ask(request, some, theirs if aside is None else (), selection, said)
            yield request, pieces[a * g : b * g], len(some), aside

    def _plain(self, keys: Keys, sizes: list[int]) -> Plain | None:
        full = self._full
        if full is None or keys.last_valid_tokens or sizes.count(full.block_bytes) < len(sizes):
            return None
        return full

    def _ask(
        self,
        request: pb.ReserveRequest,
        keys: Keys,
        sizes: Sequence[int],
        selection: Selection,
        said: Said,
    ) -> None:
        """Fills it in, field by field: arguments of its constructor cost four times as much. No `sizes`: full ones."""
        request.namespace = self.digest
        checked(keys).tell(request.keys)
        request.groups = selection.mask
        if sizes:
            request.sizes = pack_u64(sizes)
        request.last_valid_tokens = keys.last_valid_tokens
        if keys.content_keys:
            request.content_keys = b"".join(keys.content_keys)
        said.tell(request)

    def _acquire(
        self,
        keys: Keys,
        groups: Sequence[str] | None,
        shard: int,
        wait: bool,
        load_deadline_s: float,
        ttl_s: float,
        *,
        exact: bool,
    ) -> GetCall:
        selection = self._selection(groups)
        request = pb.AcquireRequest(
            namespace=self.digest,
            shard=shard,
            keys=checked(keys).message(),
            groups=selection.mask,
            lease_ttl_ms=milliseconds(ttl_s),
            no_wait=not wait,
            deadline_ms=milliseconds(load_deadline_s),
            exact=exact,
        )
        return GetCall(request, len(keys), len(selection.groups))

    def _released(self, leased: Leased) -> bool:
        try:
            with self._client.link(None) as link:
                if link.session is not leased.session:
                    return False
                return link.release(leased, self._client.timeout_s)
        except KvstoredError as error:
            raise LeaseLost(f"whether the lease held is not known: {error}") from error

    def _waited(self, leased: Leased, layers: int, stream: int | None, timeout_s: float) -> int:
        with self._client.link(None) as link:
            if link.session is not leased.session:
                raise LeaseLost("the session of a view has ended")
            return link.wait_layers(leased, layers, stream, timeout_s)

    def _renewed(self, leased: Leased, ttl_s: float) -> bool:
        with self._client.link(None) as link:
            if link.session is not leased.session:
                return False
            request = pb.RenewRequest(
                session=link.session.token,
                leases=pack_u64([leased.lease]),
                lease_ttl_ms=milliseconds(ttl_s),
            )
            answer = link.call("Renew", request, pb.RenewResponse, self._client.timeout_s)
        return not any(answer.lost)
