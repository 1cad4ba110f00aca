"""The running daemon as the store of a live replay, through the public client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter

from kvstored.client import Client, Keys, Namespace
from kvstored.core.keys import root
from kvstored.core.namespace import digest
from kvstored.pb import kvstored_pb2 as pb
from kvstored.sim.keys import Content, trace_namespace
from kvstored.sim.live import LiveOptions, drive
from kvstored.sim.measure import TierBlocks
from kvstored.sim.report import Result, Setup, result
from kvstored.sim.traces import Trace

EVICTED_COPIES = "forgotten_copies"
EVICTED_RULES = "evicted-"
LOCAL_ADDRESS = "unix://"


class DaemonStore:
    """The namespace of a trace at one client of the daemon."""

    def __init__(self, namespace: Namespace, *, is_local: bool) -> None:
        self.root = root(namespace.digest)
        self._namespace = namespace
        self._is_local = is_local

    def match(self, keys: Sequence[bytes]) -> TierBlocks:
        return self._namespace.match(Keys.opaque(keys)).tier_blocks

    @contextmanager
    def read(self, keys: Sequence[bytes]) -> Iterator[Sequence[Content]]:
        """In place under a lease on the daemon's host; from elsewhere copies, which need none."""
        if self._is_local:
            with self._namespace.get_view(Keys.opaque(keys)) as view:
                yield _prefix(view.blocks)
        else:
            yield _prefix(self._namespace.get(Keys.opaque(keys)).blocks)

    def put(self, keys: Sequence[bytes], parent: bytes, contents: Sequence[Content]) -> int:
        return self._namespace.put(Keys.opaque(keys, parent=parent), contents).committed


def replay_live(
    trace: Trace,
    options: LiveOptions,
    connect: Callable[[], AbstractContextManager[Client]],
    advance: Callable[[int], None],
) -> Result:
    """Replay against the daemon that `connect` reaches; each client gets a connection of its own."""
    spec = trace_namespace(trace, options.block_bytes)

    @contextmanager
    def store() -> Iterator[DaemonStore]:
        with connect() as client:
            is_local = client.address.startswith(LOCAL_ADDRESS)
            yield DaemonStore(client.open_namespace(spec), is_local=is_local)

    with connect() as watcher:
        before = watcher.call("Stat", pb.StatRequest(), pb.StatResponse)
        blocks_before = blocks_of(watcher, digest(spec))
        begun_s = perf_counter()
        recorder = drive(trace, options, store, advance)
        elapsed_s = perf_counter() - begun_s
        after = watcher.call("Stat", pb.StatRequest(), pb.StatResponse)
    setup = Setup(
        trace=trace.name,
        mode="live",
        policy=after.policy,
        block_tokens=trace.block_tokens,
        block_bytes=options.block_bytes,
        clients=options.clients,
        capacity_blocks=None,
        tiers=tuple(tier.name for tier in after.tiers if tier.state != "off"),
        blocks_before=blocks_before,
    )
    evicted = evicted_copies(after) - evicted_copies(before)
    return result(setup, recorder, evicted_blocks=max(0, evicted), elapsed_s=elapsed_s)


def blocks_of(client: Client, namespace: bytes) -> int:
    """What a namespace holds; 0 where it is not open."""
    answer = client.call("ListNamespaces", pb.ListNamespacesRequest(), pb.ListNamespacesResponse)
    return sum(each.blocks for each in answer.namespaces if each.digest == namespace)


def evicted_copies(stat: pb.StatResponse) -> int:
    """Copies that the daemon dropped to make room since it started, in all tiers and of all namespaces."""
    return int(
        sum(
            count
            for name, count in stat.counters.items()
            if name.startswith(EVICTED_COPIES) and EVICTED_RULES in name
        )
    )


def _prefix(blocks: Sequence[tuple[Content | None, ...] | None]) -> list[Content]:
    """The one group of every block before the first that is missing."""
    contents: list[Content] = []
    for block in blocks:
        content = block[0] if block is not None else None
        if content is None:
            break
        contents.append(content)
    return contents
