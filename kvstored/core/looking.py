"""Looking into the books without changing them: match, locate, explain, holdings, the tree."""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvstored.core.advice import HitPath
from kvstored.core.books import Books
from kvstored.core.calls import Fingerprint, Reason
from kvstored.core.carriage import Carriage
from kvstored.core.claims import Claims, Request
from kvstored.core.columns import FILLING, FIRST, READY
from kvstored.core.fills import Fills, held_units
from kvstored.core.groups import checkpoint_tokens, required_bytes, resumable, resume_bytes
from kvstored.core.hints import Hint
from kvstored.core.leases import Leases
from kvstored.core.readability import NOT_READABLE
from kvstored.core.referring import is_lossy
from kvstored.core.types import KeyBatch, Match, NamespaceId, Part, Rows, TierId
from kvstored.core.views import Holding, TreeNode, Verdict

Namespaces = Collection[NamespaceId]

_PARTS = {Part.DENSE: "", Part.SPARSE: "sparse groups ", Part.CHECKPOINT: "window and state "}
GONE = {
    Reason.WATERMARK: "evicted to bring {} below its watermark",
    Reason.DEMAND: "evicted from {} to make room for a new block",
    Reason.RETIRED: "evicted from {}, its namespace is retired",
    Reason.SUPERSEDED: "evicted from {}, a longer block has taken its place",
    Reason.EXPIRED: "its time in {} ran out",
    Reason.REMOVED: "removed from {} by a call",
    Reason.DISCARDED: "dropped from {} with its request",
    Reason.REPLACED: "replaced in {} by a later write",
    Reason.CORRUPT: "dropped from {}, its bytes failed their checksum",
    Reason.FILL_LOST: "its writer was gone before it committed to {}",
    Reason.INCOMPLETE: "dropped from {}, a group or shard of it never came",
    Reason.LOSSY: "in {}, but not exactly as it was put",
    Reason.NO_SPACE: "no space in {} when it was written",
    Reason.IO_ERROR: "lost from {}, which failed",
    Reason.NEVER_STORED: "never stored in {}",
    Reason.RECOVERING: "not found again in {}",
    Reason.WRONG_NAMESPACE: "of another namespace in {}",
    Reason.UNKNOWN: "gone from {}",
}
"""In words, with the tier's name; one line of 80 columns with its age."""


class Looking:
    def __init__(
        self, books: Books, fills: Fills, leases: Leases, claims: Claims, carriage: Carriage
    ) -> None:
        self._books = books
        self._fills = fills
        self._leases = leases
        self._claims = claims
        self._carriage = carriage

    def end_of(self, session: int, request_id: bytes) -> tuple[Fingerprint, Hint] | None:
        """Where the path of a running request ends, and what was said at its begin."""
        request = self._claims.request(session, request_id)
        if not request.path:
            return None
        depth = self._books.tree.depth
        return self._books.fingerprint(max(request.path, key=depth.item)), request.hint

    def copies_of(self, ns: NamespaceId, fingerprint: Fingerprint) -> list[int]:
        block = self._books.index.find_one(fingerprint)
        if block < 0 or self._books.blocks.ns[block] != ns:
            return []
        return list(self._books.copies_of(block))

    def match(self, ns: NamespaceId, keys: KeyBatch, *, exact: bool = False) -> Match:
        """The longest readable run; a partial block ends it, and where only `exact` ones count one that is not."""
        blocks = self._books.blocks
        spec = self._books.layouts[ns].spec
        rows = self._books.index.find(keys.fingerprints)
        readable = (rows >= 0) & (blocks.fast[rows] != NOT_READABLE) & (blocks.ns[rows] == ns)
        lossy = self._lossy(rows, readable)
        if exact:
            readable &= ~lossy
        hit = int(np.argmin(readable)) if not readable.all() else len(rows)
        short = np.flatnonzero(blocks.valid[rows[:hit]] != spec.block_tokens)
        if len(short):
            hit = int(short[0]) + 1
        if not hit:
            reason = self._reason(rows, keys, 0) if len(rows) else ""
            reason = str(Reason.LOSSY) if lossy[:1].any() else reason
            return Match(0, 0, 0, 0, (0, 0, 0, 0), reason)
        run = rows[:hit]
        last = int(blocks.valid[run[-1]])
        tokens = (hit - 1) * spec.block_tokens + last
        partial = last if last != spec.block_tokens else 0
        have = blocks.have[run].astype(np.uint64)
        checkpoint = checkpoint_tokens(spec, hit, partial, have)
        tiers = np.bincount(blocks.fast[run], minlength=4)
        return Match(
            hit_blocks=hit,
            hit_tokens=tokens,
            checkpoint_tokens=checkpoint,
            replay_tokens=tokens - checkpoint,
            tier_blocks=(int(tiers[0]), int(tiers[1]), int(tiers[2]), int(tiers[3])),
            miss_reason="" if hit == len(rows) else self._reason(rows, keys, hit),
            lossy_blocks=int(np.count_nonzero(lossy[:hit])),
        )

    def hit_path(self, ns: NamespaceId, keys: KeyBatch, hit_blocks: int) -> HitPath:
        """The first `hit_blocks` of the keys, which `match` found readable, as it takes to weigh loading them."""
        blocks, spec = self._books.blocks, self._books.layouts[ns].spec
        run = self._books.index.find(keys.fingerprints[:hit_blocks])
        tokens = blocks.valid[run].astype(np.int64)
        sizes = np.full(len(run), required_bytes(spec, spec.block_tokens), dtype=np.int64)
        last = int(tokens[-1]) if len(run) else spec.block_tokens
        sizes[-1:] = required_bytes(spec, last)
        have = blocks.have[run].astype(np.uint64)
        is_boundary = resumable(spec, last, have) if len(run) else np.zeros(0, dtype=np.bool_)
        return HitPath(blocks.fast[run], sizes, tokens, is_boundary, resume_bytes(spec))

    def _lossy(self, rows: Rows, readable: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of these blocks are not what was put."""
        lossy = np.zeros(len(rows), dtype=np.bool_)
        if self._books.space.frames.lossy:
            at = np.flatnonzero(readable)
            lossy[at] = [is_lossy(self._books, row) for row in rows[at].tolist()]
        return lossy

    @property
    def running(self) -> Mapping[tuple[int, bytes], Request]:
        return self._claims.requests

    def holds_lease(self, session: int, lease: int) -> bool:
        """Whether this session's lease is open."""
        found = self._leases.open.get(lease)
        return found is not None and found.session == session

    def locate(
        self, ns: NamespaceId, keys: KeyBatch
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        blocks = self._books.blocks
        rows = self._books.index.find(keys.fingerprints)
        there = (rows >= 0) & (blocks.ns[rows] == ns)
        tiers = np.where(there, blocks.tiers[rows], 0).astype(np.uint8)
        generations = np.where(tiers != 0, blocks.generation[rows], 0).astype(np.uint64)
        return tiers, generations

    def explain(self, ns: NamespaceId, fingerprint: Fingerprint, now_s: float) -> Verdict:
        books = self._books
        block = books.index.find_one(fingerprint)
        if block >= 0 and books.blocks.ns[block] == ns:
            if books.blocks.fast[block] != NOT_READABLE:
                return self._stored(block, now_s)
            if any(books.copies.state[copy] == FILLING for copy in books.copies_of(block)):
                return Verdict(
                    Reason.INCOMPLETE,
                    (),
                    0.0,
                    "being written, or a shard or group of it is missing",
                )
        gone = books.history.get(fingerprint)
        if gone is not None:
            age_s = now_s - gone.at_s
            text = f"{GONE[gone.reason].format(gone.tier.name.lower())}, {age_s:.1f} s ago"
            return Verdict(gone.reason, (), gone.at_s, text)
        if books.recovering:
            return Verdict(
                Reason.RECOVERING, (), 0.0, "not seen yet: a tier is still being scanned"
            )
        if books.history.is_full:
            oldest_s = now_s - books.history.oldest_s
            return Verdict(
                Reason.UNKNOWN, (), 0.0, f"unknown, older than {oldest_s:.0f} s of history"
            )
        if not books.history.is_whole:
            return Verdict(Reason.UNKNOWN, (), 0.0, "unknown, older than the daemon's start")
        return Verdict(Reason.NEVER_STORED, (), 0.0, "never stored")

    def _stored(self, block: int, now_s: float) -> Verdict:
        """Where its parts are, and how warm it is."""
        books = self._books
        tiers: dict[Part, set[TierId]] = {}
        is_read = is_first = False
        for copy in books.copies_of(block):
            if books.copies.state[copy] == READY:
                tier = TierId(int(books.copies.tier[copy]))
                tiers.setdefault(Part(int(books.copies.part[copy])), set()).add(tier)
                is_read |= bool(books.copies.readers[copy])
                is_first |= bool(books.copies.flags[copy] & FIRST)
        words = [
            f"{_PARTS[part]}in {' and '.join(tier.name.lower() for tier in sorted(tiers[part]))}"
            for part in sorted(tiers)
        ]
        gone = books.history.lapsed(books.fingerprint(block))
        if gone is not None and Part.CHECKPOINT not in tiers:
            age_s = now_s - gone.at_s
            words.append(
                f"window and state {gone.reason} from {gone.tier.name.lower()} {age_s:.1f} s ago"
            )
        held, hits = int(books.blocks.holds[block]), int(books.blocks.hits[block])
        heat = books.heat(block)
        use = [f"P{heat} {heat.name.lower()}", f"{hits} hit{'s' * (hits != 1)}"]
        use += ["leaves first"] * is_first
        use += [
            tag.name.lower().replace("_", " ") for tag in books.tags.of(block, now_s) if tag.name
        ]
        use += ["being read"] * is_read + [f"held {held}x"] * bool(held)
        use += ["not exact"] * is_lossy(books, block)
        text = "; ".join([*words, ", ".join(use)])
        everywhere = tuple(sorted(set().union(*tiers.values())))
        return Verdict(None, everywhere, float(books.blocks.last_s[block]), text)

    def namespace_use(self, ns: NamespaceId) -> tuple[int, tuple[int, int, int, int]]:
        """Readable blocks of a namespace, and its units by tier."""
        blocks, copies = self._books.blocks, self._books.copies
        top = blocks.top
        count = int(np.count_nonzero((blocks.ns[:top] == ns) & (blocks.fast[:top] != NOT_READABLE)))
        rows = np.flatnonzero(copies.block[: copies.top] >= 0)
        rows = rows[blocks.ns[copies.block[rows]] == ns]
        units = np.bincount(copies.tier[rows], weights=copies.units[rows], minlength=4)
        return count, (int(units[0]), int(units[1]), int(units[2]), int(units[3]))

    def holdings(self, among: Namespaces, limit: int) -> tuple[list[Holding], bool]:
        """Leases, fills, pins and requests in these namespaces; the flag tells that there are more than `limit`."""
        found: list[Holding] = []
        for holding in self._holdings():
            if holding.ns not in among:
                continue
            if len(found) == limit:
                return found, True
            found.append(holding)
        return found, False

    def _holdings(self) -> Iterator[Holding]:
        books = self._books
        for lease in self._leases.open.values():
            copies = lease.all_copies()
            units = sum(int(books.copies.units[copy]) for copy in copies)
            state = (
                "loading" if any(books.copies.state[copy] != READY for copy in copies) else "held"
            )
            blocks = lease.block_count
            yield Holding(
                "lease",
                lease.id,
                lease.session,
                lease.ns,
                blocks,
                units,
                lease.begun_s,
                lease.expires_s,
                state,
            )
        for fill in self._fills.open:
            units = held_units(books, fill)
            yield Holding(
                "fill",
                fill.id,
                fill.session,
                fill.ns,
                1,
                units,
                fill.begun_s,
                fill.expires_s,
                "open",
            )
        for pin in self._claims.pins.values():
            units = pin.units
            state = "hard" if pin.is_hard else "soft"
            yield Holding(
                "pin",
                pin.id,
                pin.session,
                pin.ns,
                len(pin.rows),
                units,
                pin.begun_s,
                pin.expires_s,
                state,
            )
        for number, request in enumerate(self._claims.requests.values()):
            yield Holding(
                "request",
                number,
                request.session,
                request.ns,
                len(request.path),
                0,
                request.begun_s,
                0.0,
                "running",
            )

    def tree_nodes(self, among: Namespaces, limit: int) -> tuple[list[TreeNode], bool]:
        """Radix nodes of these namespaces, parents before their children where the tree lists them so."""
        found: list[TreeNode] = []
        for node in self._books.tree.nodes(0, 1 << 31):
            owner = int(self._books.blocks.ns[node.head])
            if owner not in among:
                continue
            if len(found) == limit:
                return found, True
            run = self._run(node.head, node.tail, node.length)
            blocks = self._books.blocks
            fast = blocks.fast[run]
            held_in = blocks.tiers[run][fast != NOT_READABLE]
            tiers = [int(np.count_nonzero(held_in >> tier & 1)) for tier in TierId]
            found.append(
                TreeNode(
                    id=node.id,
                    parent=node.parent,
                    ns=NamespaceId(owner),
                    head=self._books.fingerprint(node.head),
                    depth=int(self._books.tree.depth[node.head]),
                    blocks=node.length,
                    tokens=self._tokens(owner, run),
                    children=len(node.children),
                    holds=int(blocks.holds[node.head]),
                    hits=int(blocks.hits[run].max()),
                    heat=self._books.heat(node.head),
                    tier_blocks=(tiers[0], tiers[1], tiers[2], tiers[3]),
                )
            )
        return found, False

    def _tokens(self, ns: int, run: Rows) -> int:
        """A block that only stands in for its children's parent is full."""
        valid = self._books.blocks.valid[run].astype(np.int64)
        full = self._books.layouts[NamespaceId(ns)].spec.block_tokens
        return int(np.where(valid == 0, full, valid).sum())

    def _run(self, head: int, tail: int, length: int) -> Rows:
        run = np.empty(length, dtype=np.int32)
        block = tail
        for i in range(length - 1, -1, -1):
            run[i] = block
            block = int(self._books.tree.parent[block])
        assert run[0] == head
        return run

    def _reason(self, rows: Rows, keys: KeyBatch, i: int) -> str:
        low, high = keys.fingerprints[i].tolist()
        return self._leases.miss_reason(int(rows[i]), (low, high)).value
