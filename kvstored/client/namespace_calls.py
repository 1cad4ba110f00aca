"""The calls of one open namespace that move no bytes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from numpy.typing import ArrayLike

from kvstored.client.advice import advice_of, ask_for
from kvstored.client.attention import access_message, resident_message
from kvstored.client.channel import Session
from kvstored.client.hints import hint_message
from kvstored.client.keys import ExtraKeys, Keys, checked, token_keys
from kvstored.client.links import Link, Linked, milliseconds, opened
from kvstored.client.results import AccessReport, Job, Located, OpenedNamespace, Pinned
from kvstored.core.advice import LoadQuestion, PrefillRun
from kvstored.core.hints import NO_HINT, Hint
from kvstored.core.keys import Tokens
from kvstored.core.tags import Tag
from kvstored.core.types import Match
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import unpack_u8, unpack_u64


class NamespaceCalls:
    """What is asked and told about blocks; Namespace adds their bytes."""

    def __init__(self, client: Linked, facts: OpenedNamespace, session: Session) -> None:
        self._client = client
        self._opened_in = session
        self.digest = facts.digest
        self.spec = facts.spec

    # ---- keys

    def keys(self, tokens: Tokens, extra_keys: ExtraKeys = ()) -> Keys:
        """Keys of all blocks of a sequence from its first token; the last block may be partial.

        `extra_keys`: what else makes the sequence its own: cache salt, LoRA id, hashes of images.
        """
        return token_keys(self.digest, self.spec, tokens, extra_keys)

    def match(
        self,
        keys: Keys,
        *,
        ask: LoadQuestion | None = None,
        conversation: str = "",
        exact: bool = False,
        timeout_s: float | None = None,
    ) -> Match:
        """The longest stored prefix. With `ask` (`LoadQuestion()` will do) its `advice` tells what loading it takes, beside computing it. `conversation`: as
        the session of hints; what its last turn left on NVMe begins to come up."""
        with self._link(timeout_s) as link:
            request = pb.MatchRequest(
                namespace=self.digest,
                keys=checked(keys).message(),
                last_valid_tokens=keys.last_valid_tokens,
                session=link.session.token,
                conversation=conversation,
                exact=exact,
            )
            if ask is not None:
                ask_for(request, ask)
            answer = link.call("Match", request, pb.MatchResponse, self._timeout_s(timeout_s))
        hbm, dram, nvme, remote = [*answer.tier_blocks, 0, 0, 0, 0][:4]
        return Match(
            hit_blocks=answer.hit_blocks,
            hit_tokens=answer.hit_tokens,
            checkpoint_tokens=answer.checkpoint_tokens,
            replay_tokens=answer.replay_tokens,
            tier_blocks=(hbm, dram, nvme, remote),
            miss_reason=answer.miss_reason,
            advice=advice_of(answer.advice) if answer.HasField("advice") else None,
            lossy_blocks=answer.lossy_blocks,
        )

    def locate(self, keys: Keys, *, timeout_s: float | None = None) -> Located:
        request = pb.LocateRequest(namespace=self.digest, keys=checked(keys).message())
        with self._link(timeout_s) as link:
            answer = link.call("Locate", request, pb.LocateResponse, self._timeout_s(timeout_s))
        return Located(
            tuple(unpack_u8(answer.tiers, "tiers", len(keys)).tolist()),
            tuple(unpack_u64(answer.generations, "generations", len(keys)).tolist()),
        )

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

    def touch(self, keys: Keys, *, hint: Hint = NO_HINT, timeout_s: float | None = None) -> int:
        """Counts as a use, of a request of which `hint` is known; the blocks that were there."""
        with self._link(timeout_s) as link:
            request = pb.TouchRequest(
                session=link.session.token,
                namespace=self.digest,
                keys=checked(keys).message(),
                hint=hint_message(hint),
            )
            return link.call("Touch", request, pb.TouchResponse, self._timeout_s(timeout_s)).blocks

    def report(
        self,
        keys: Keys,
        scores: Sequence[float],
        *,
        group: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Tells what the engine's attention selected, one score a key of this group (the first unless given): above 0 counts as a use, 0 does
        not. Advisory. The selected blocks that were there.
        """
        names = [each.name for each in self.spec.groups]
        if group and group not in names:
            raise InvalidArgument(f"no such group name={group!r} groups={names}")
        with self._link(timeout_s) as link:
            request = pb.ReportRequest(
                session=link.session.token,
                namespace=self.digest,
                keys=checked(keys).message(),
                scores=scores,
                group=names.index(group) if group else 0,
            )
            answer = link.call("Report", request, pb.ReportResponse, self._timeout_s(timeout_s))
        return answer.blocks

    def report_access(
        self,
        keys: Keys,
        selected: ArrayLike | None = None,
        *,
        mass: Sequence[float] = (),
        tags: Sequence[Tag] = (),
        group: str = "",
        layer: int | None = None,
        timeout_s: float | None = None,
    ) -> AccessReport:
        """Tells which blocks some decode steps selected, (steps, keys) booleans, oldest first, or the attention mass of each key in one step; and with
        one of these or alone what each block holds. Advisory; many steps in one report cost the daemon little more than one."""
        request = access_message(self.spec, keys, selected, mass, tags, group, layer)
        request.namespace = self.digest
        with self._link(timeout_s) as link:
            request.session = link.session.token
            answer = link.call(
                "ReportAccess", request, pb.ReportAccessResponse, self._timeout_s(timeout_s)
            )
        return AccessReport(answer.taken, answer.blocks, answer.raised, answer.wanted)

    def report_resident(
        self, keys: Keys, *, deadline_s: float, timeout_s: float | None = None
    ) -> int:
        """Predicts what is going to be read by then, in place of this session's earlier prediction; the blocks that are scheduled to come up for it."""
        request = resident_message(keys, deadline_s)
        request.namespace = self.digest
        with self._link(timeout_s) as link:
            request.session = link.session.token
            answer = link.call(
                "ReportResident", request, pb.ReportResidentResponse, self._timeout_s(timeout_s)
            )
        return answer.wanted

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
        self,
        keys: Keys,
        *,
        request_id: bytes = b"",
        hint: Hint = NO_HINT,
        load_deadline_s: float = 0,
        for_transfer: bool = False,
        batch: bytes = b"",
        timeout_s: float | None = None,
    ) -> bytes:
        """A running request claims the path of these keys until it completes or this session ends; its id. `hint`: what is known already,
        such as the session; the rest may follow at its completion. `load_deadline_s`: what lies on NVMe is scheduled to be in DRAM by then;
        `for_transfer`: it is going to be sent to another node. `batch`: a name that requests with much in common share."""
        with self._link(timeout_s) as link:
            request = pb.BeginRequestRequest(
                session=link.session.token,
                namespace=self.digest,
                keys=checked(keys).message(),
                request_id=request_id,
                hint=hint_message(hint),
                load_deadline_ms=milliseconds(load_deadline_s),
                for_transfer=for_transfer,
                batch=batch,
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
        self,
        request_id: bytes,
        *,
        discard: bool = False,
        hint: Hint = NO_HINT,
        prefill: PrefillRun | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Ends the claim; `discard` also forgets what only this request used. Blocks dropped. `hint`: what is known of it at last; `prefill`:
        what had to be computed for it, from which the daemon knows how fast the namespace's engines are."""
        run = prefill or PrefillRun(0, 0.0)
        with self._link(timeout_s) as link:
            request = pb.CompleteRequestRequest(
                session=link.session.token,
                request_id=request_id,
                outcome=pb.DISCARD if discard else pb.CACHE,
                hint=hint_message(hint),
                prefill_tokens=run.tokens,
                prefill_first_token=run.first_token,
                prefill_s=run.seconds,
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
            self._open_in(link, self._timeout_s(timeout_s))
            yield link

    def _open_in(self, link: Link, timeout_s: float) -> None:
        if link.session is not self._opened_in:
            facts = opened(link, self.spec, timeout_s, supersede=False)
            assert facts.digest == self.digest, "a specification has one digest"
            self._opened_in = link.session
