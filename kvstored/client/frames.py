"""What a remote client knows of frames on the wire: what its daemon offers, what the link carries, and when they are faster.

The codec is loaded only where the daemon offers frames; without it, or where it cannot be imported, bytes travel as they are.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvstored.client.bulk_socket import BulkSocket, Runs
from kvstored.client.segments import Bytes
from kvstored.clock import Clock
from kvstored.core.types import NamespaceSpec
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.bulk import FRAMES_VERSION

if TYPE_CHECKING:
    from kvstored.client.framing import Framing
    from kvstored.codec.link import Link


class Frames:
    """Thread-safe but for counts of its links, of which one more or less does not matter."""

    def __init__(self, offer: pb.Frames, framing: "Framing", outgoing: "Link", incoming: "Link"):
        self.offer = offer
        self.framing = framing
        self.outgoing = outgoing
        self.incoming = incoming

    def learn(self, digest: bytes, spec: NamespaceSpec) -> None:
        self.framing.learn(digest, spec)

    def ask_for(self, request: pb.AcquireRequest) -> None:
        """The answer may have frames."""
        request.frames = FRAMES_VERSION
        request.decoders = self.framing.threads
        request.link_bytes_per_s = round(self.incoming.bytes_per_s)

    def receive(self, peer: BulkSocket, targets: Sequence[Runs], ends_s: float) -> list[int | None]:
        from kvstored.client.framed_socket import receive_framed  # noqa: PLC0415 - as `offered`

        self.incoming.framed()
        return receive_framed(peer, self.framing, targets, ends_s)

    def unframing(
        self, sizes: Sequence[int], take: Callable[[Bytes], None]
    ) -> Callable[[Bytes], None]:
        """Takes a stream that is cut anywhere."""
        from kvstored.client.framing import Unframing  # noqa: PLC0415 - as `offered`

        self.incoming.framed()
        return Unframing(sizes, take, self.framing.count_received).write

    def sending(self, clock: Clock) -> "Sending":
        return Sending(self, clock)


class Sending:
    """One put: which of its parts go as frames, and how long its bytes took where none did."""

    def __init__(self, frames: Frames, clock: Clock) -> None:
        self._frames = frames
        self._clock = clock
        self._begun_s = clock.elapsed_s()
        self._plain_bytes = 0
        self._is_framed = False

    def chosen(
        self, request: pb.ReserveRequest, pieces: Sequence[tuple[int, Runs]]
    ) -> list[tuple[int, Runs]]:
        """The pieces, numbered by key and group, with the numbers of their groups where they go as frames; else none."""
        frames = self._frames
        found = frames.framing.with_groups(request.namespace, request.groups, pieces)
        speed = frames.outgoing.bytes_per_s
        if found and frames.framing.pays(
            request.namespace, found, link_bytes_per_s=speed, decoders=frames.offer.decoders
        ):
            self._is_framed = True
            frames.outgoing.framed()
            return found
        self._plain_bytes += sum(run.size for _, runs in pieces for run in runs)
        return []

    def send(
        self, peer: BulkSocket, digest: bytes, pieces: Sequence[tuple[int, Runs]], ends_s: float
    ) -> list[int]:
        from kvstored.client.framed_socket import send_framed  # noqa: PLC0415 - as `offered`

        return send_framed(peer, self._frames.framing, digest, pieces, ends_s)

    def streamed(
        self, digest: bytes, pieces: Sequence[tuple[int, Runs]]
    ) -> Iterator[tuple[Bytes, int]]:
        """Heads, bytes of pieces and frames in turn; with the last of each piece its checksum, with others -1."""
        with self._frames.framing.encoding(digest, pieces) as made:
            for each in made:
                yield each.head, -1
                for view in each.views:
                    yield view, each.checksum if view is each.views[-1] else -1

    def ended(self) -> None:
        """All is stored."""
        if not self._is_framed:
            took_s = self._clock.elapsed_s() - self._begun_s
            self._frames.outgoing.carried(self._plain_bytes, took_s)


def offered(offer: pb.Frames) -> Frames | None:
    """None where the daemon offers none that are known here, or the codec's packages are not installed."""
    if offer.version != FRAMES_VERSION:
        return None
    try:
        from kvstored.client.framing import Framing  # noqa: PLC0415 - without frames nobody needs it
        from kvstored.codec.link import Link  # noqa: PLC0415 - likewise
    except ImportError:
        return None
    given = float(offer.link_bytes_per_s)
    return Frames(offer, Framing(always=offer.always), Link(given), Link(given))
