"""The calls of one open namespace."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvstored.client.channel import Session
from kvstored.client.copying import Bytes
from kvstored.client.keys import ExtraKeys, Keys, checked, extra_keys_of
from kvstored.client.links import (
    GetCall,
    Glance,
    Leased,
    Link,
    Linked,
    PutPart,
    milliseconds,
    opened,
)
from kvstored.client.optimistic import completed, seed_if_shown
from kvstored.client.results import GetResult, Job, Located, OpenedNamespace, Pinned, PutResult
from kvstored.client.rows import (
    Rows,
    Selection,
    parts_of,
    selection_of,
    sizes_of,
    sources_of,
    worth_storing,
)
from kvstored.client.view import View
from kvstored.core.keys import Tokens, block_keys, root
from kvstored.core.types import Match
from kvstored.errors import KvstoredError, LeaseLost
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_u64, unpack_u8, unpack_u64


class Namespace:
    """A namespace of one client: thread-safe, and open again by itself after the daemon was restarted.

    Times out like the client unless `timeout_s` is given. Where a call takes keys, at most 4,096.
    """

    def __init__(self, client: Linked, facts: OpenedNamespace, session: Session) -> None:
        self._client = client
        self._opened_in = session
        self.digest = facts.digest
        self.spec = facts.spec
        self._seed = seed_if_shown(self.digest, self.spec)

    # ---- keys

    def keys(self, tokens: Tokens, extra_keys: ExtraKeys = ()) -> Keys:
        """Keys of all blocks of a sequence from its first token; the last block may be partial.

        `extra_keys`: what else makes the sequence its own: cache salt, LoRA id, hashes of images.
        """
        made = block_keys(
            root(self.digest, extra_keys_of(extra_keys)), tokens, self.spec.block_tokens
        )
        last_valid_tokens = len(tokens) % self.spec.block_tokens
        return Keys(tuple(made), last_valid_tokens=last_valid_tokens, first_block=0)

    def match(self, keys: Keys, *, timeout_s: float | None = None) -> Match:
        with self._link(timeout_s) as link:
            request = pb.MatchRequest(
                namespace=self.digest,
                keys=checked(keys).message(),
                last_valid_tokens=keys.last_valid_tokens,
                session=link.session.token,
            )
            answer = link.call("Match", request, pb.MatchResponse, self._timeout_s(timeout_s))
        hbm, dram, nvme, remote = [*answer.tier_blocks, 0, 0, 0, 0][:4]
        return Match(
            hit_blocks=answer.hit_blocks,
            hit_tokens=answer.hit_tokens,
            checkpoint_tokens=answer.checkpoint_tokens,
            replay_tokens=answer.replay_tokens,
            tier_blocks=(hbm, dram, nvme, remote),
            miss_reason=answer.miss_reason,
        )

    def locate(self, keys: Keys, *, timeout_s: float | None = None) -> Located:
        request = pb.LocateRequest(namespace=self.digest, keys=checked(keys).message())
        with self._link(timeout_s) as link:
            answer = link.call("Locate", request, pb.LocateResponse, self._timeout_s(timeout_s))
        return Located(
            tuple(unpack_u8(answer.tiers, "tiers", len(keys)).tolist()),
            tuple(unpack_u64(answer.generations, "generations", len(keys)).tolist()),
        )

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
        timeout_s: float | None = None,
    ) -> PutResult:
        """Stores one row of arrays a key; visible block by block, each whole or not at all.

        `groups`: the groups that the rows hold, in namespace order; the required ones unless given. `ends_path`: a prompt or an output
        ends at the last key, which is where the `boundary` policy has its checkpoint. Window and state arrays that no future hit can
        consume are left out. The timeout bounds each message, not the copying. An exception leaves nothing of the running part behind.
        """
        selection = selection_of(self.spec, groups)
        given = sources_of(rows, keys, selection)
        sources = worth_storing(given, self.spec, selection, keys, ends_path=ends_path)
        parts = [
            PutPart(
                self._reserve(
                    keys[a:b],
                    sources[a * g : b * g],
                    selection,
                    shard,
                    ends_path=ends_path,
                    request_id=request_id,
                    fill_ttl_s=fill_ttl_s,
                ),
                sources[a * g : b * g],
                b - a,
            )
            for g in (len(selection.groups),)
            for a, b in parts_of(sources, g)
        ]
        if not parts:
            return PutResult(())
        with self._link(timeout_s) as link:
            return PutResult(tuple(link.put(parts, self._timeout_s(timeout_s))))

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
        selection = selection_of(self.spec, groups)
        sources = sources_of(rows, keys, selection)
        request = self._reserve(keys, sources, selection, shard)
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
        load_deadline_s: float = 0,
        timeout_s: float | None = None,
    ) -> GetResult:
        """Private copies of what is there. `out`: writable arrays to copy into instead of new ones; what they hold counts for hits only.

        `verify=False` skips the checksum, where the daemon allows that, and asks instead whether the lease held. `wait=False`
        takes what is in DRAM now; the rest is PENDING, loads on, and ends in a LOADED or LOAD_FAILED event. `optimistic`: whether
        verified reads may go without a message (docs/api.md); as the client says unless given.
        """
        wait_s = self._timeout_s(timeout_s)

        def acquired(glance: Glance) -> GetResult:
            call = self._acquire(glance.keys, groups, shard, wait, load_deadline_s, 0)
            return link.get(replace(call, out=glance.out, verify=verify), wait_s)

        glance = Glance(self.digest, self._seed or 0, checked(keys), out)
        may = self._client.optimistic if optimistic is None else optimistic
        may &= verify and self._seed is not None and not (keys.extra_keys or shard or groups)
        with self._link(timeout_s) as link:
            seen = link.glance(glance, wait_s) if may else None
            return completed(glance, seen, acquired)

    def get_view(
        self,
        keys: Keys,
        *,
        groups: Sequence[str] | None = None,
        shard: int = 0,
        ttl_s: float = 0,
        verify: bool = False,
        wait: bool = True,
        load_deadline_s: float = 0,
        timeout_s: float | None = None,
    ) -> View:
        """Blocks in place, without a copy, under a lease of `ttl_s` (0: the daemon's default). Leave it by `with` or `release`."""
        call = self._acquire(keys, groups, shard, wait, load_deadline_s, ttl_s)
        with self._link(timeout_s) as link:
            full = GetCall(call.request, call.keys, call.groups, None, verify)
            leased = link.lease(full, self._timeout_s(timeout_s))
        return View(leased, release=self._released, renew=self._renewed)

    # ---- keeping

    def pin(
        self, keys: Keys, *, ttl_s: int, hard: bool = False, timeout_s: float | None = None
    ) -> Pinned:
        """Keeps the readable blocks and their ancestors for `ttl_s`. The pin is the tenant's, it outlives the session.

        `hard`: also where nothing else can be evicted. It keeps blocks in the tier where they are: `prefetch` first what is to stay in DRAM.
        """
        with self._link(timeout_s) as link:
            request = pb.PinRequest(
                session=link.session.token,
                namespace=self.digest,
                keys=checked(keys).message(),
                strength=pb.HARD if hard else pb.SOFT,
                ttl_s=ttl_s,
            )
            answer = link.call("Pin", request, pb.PinResponse, self._timeout_s(timeout_s))
        return Pinned(answer.pin, answer.blocks, answer.bytes)

    def unpin(self, pin: int, *, timeout_s: float | None = None) -> bool:
        with self._link(timeout_s) as link:
            request = pb.UnpinRequest(pin=pin)
            return link.call("Unpin", request, pb.UnpinResponse, self._timeout_s(timeout_s)).found

    def prefetch(
        self,
        keys: Keys,
        *,
        tier: str = "dram",
        deadline_s: float = 0,
        timeout_s: float | None = None,
    ) -> Job:
        """Starts loading into the tier, best effort; the job ends in an event."""
        with self._link(timeout_s) as link:
            request = pb.PrefetchRequest(
                session=link.session.token,
                namespace=self.digest,
                keys=checked(keys).message(),
                tier=tier,
                deadline_ms=milliseconds(deadline_s),
            )
            answer = link.call("Prefetch", request, pb.PrefetchResponse, self._timeout_s(timeout_s))
        return Job(answer.job, answer.blocks)

    def touch(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Counts as a use; the blocks that were there."""
        with self._link(timeout_s) as link:
            request = pb.TouchRequest(
                session=link.session.token, namespace=self.digest, keys=checked(keys).message()
            )
            return link.call("Touch", request, pb.TouchResponse, self._timeout_s(timeout_s)).blocks

    def remove(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Forgets blocks in every tier; how many there were."""
        request = pb.RemoveRequest(namespace=self.digest, keys=checked(keys).message())
        with self._link(timeout_s) as link:
            return link.call(
                "Remove", request, pb.RemoveResponse, self._timeout_s(timeout_s)
            ).blocks

    def clear(self, *, timeout_s: float | None = None) -> int:
        """Forgets every block of the namespace; how many there were."""
        request = pb.ClearRequest(namespace=self.digest)
        with self._link(timeout_s) as link:
            return link.call("Clear", request, pb.ClearResponse, self._timeout_s(timeout_s)).blocks

    # ---- the life of a request

    def begin_request(
        self, keys: Keys, *, request_id: bytes = b"", timeout_s: float | None = None
    ) -> bytes:
        """A running request claims the path of these keys until it completes or this session ends; its id."""
        with self._link(timeout_s) as link:
            request = pb.BeginRequestRequest(
                session=link.session.token,
                namespace=self.digest,
                keys=checked(keys).message(),
                request_id=request_id,
            )
            timeout_s = self._timeout_s(timeout_s)
            answer = link.call("BeginRequest", request, pb.BeginRequestResponse, timeout_s)
        return answer.request_id

    def extend_request(
        self, request_id: bytes, keys: Keys, *, timeout_s: float | None = None
    ) -> int:
        """The request's path grew by these keys; blocks on it now."""
        with self._link(timeout_s) as link:
            request = pb.ExtendRequestRequest(
                session=link.session.token, request_id=request_id, keys=checked(keys).message()
            )
            timeout_s = self._timeout_s(timeout_s)
            return link.call("ExtendRequest", request, pb.ExtendRequestResponse, timeout_s).blocks

    def complete_request(
        self, request_id: bytes, *, discard: bool = False, timeout_s: float | None = None
    ) -> int:
        """Ends the claim; `discard` also forgets what only this request used. Blocks dropped."""
        with self._link(timeout_s) as link:
            request = pb.CompleteRequestRequest(
                session=link.session.token,
                request_id=request_id,
                outcome=pb.DISCARD if discard else pb.CACHE,
            )
            answer = link.call(
                "CompleteRequest", request, pb.CompleteRequestResponse, self._timeout_s(timeout_s)
            )
        return answer.dropped_blocks

    # ---- inside

    def _timeout_s(self, timeout_s: float | None) -> float:
        return self._client.timeout_s if timeout_s is None else timeout_s

    @contextmanager
    def _link(self, timeout_s: float | None) -> Iterator[Link]:
        """A link in whose session the namespace is open."""
        with self._client.link(timeout_s) as link:
            if link.session is not self._opened_in:
                facts = opened(link, self.spec, self._timeout_s(timeout_s), supersede=False)
                assert facts.digest == self.digest, "a specification has one digest"
                self._opened_in = link.session
            yield link

    def _reserve(
        self,
        keys: Keys,
        sources: Sequence[Bytes | None],
        selection: Selection,
        shard: int,
        *,
        ends_path: bool = True,
        request_id: bytes = b"",
        fill_ttl_s: float = 0,
    ) -> pb.ReserveRequest:
        return pb.ReserveRequest(
            namespace=self.digest,
            shard=shard,
            keys=checked(keys).message(),
            groups=selection.mask,
            sizes=pack_u64(sizes_of(sources)),
            last_valid_tokens=keys.last_valid_tokens,
            fill_ttl_ms=milliseconds(fill_ttl_s),
            request_id=request_id,
            ends_path=ends_path,
        )

    def _acquire(
        self,
        keys: Keys,
        groups: Sequence[str] | None,
        shard: int,
        wait: bool,
        load_deadline_s: float,
        ttl_s: float,
    ) -> GetCall:
        selection = selection_of(self.spec, groups)
        request = pb.AcquireRequest(
            namespace=self.digest,
            shard=shard,
            keys=checked(keys).message(),
            groups=selection.mask,
            lease_ttl_ms=milliseconds(ttl_s),
            no_wait=not wait,
            deadline_ms=milliseconds(load_deadline_s),
        )
        return GetCall(request, len(keys), len(selection.groups))

    def _released(self, leased: Leased) -> bool:
        try:
            with self._client.link(None) as link:
                if link.session is not leased.session:
                    return False
                request = pb.ReleaseRequest(
                    session=link.session.token, leases=pack_u64([leased.lease])
                )
                answer = link.call("Release", request, pb.ReleaseResponse, self._client.timeout_s)
            return not any(answer.lost)
        except KvstoredError as error:
            raise LeaseLost(f"whether the lease held is not known: {error}") from error

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
