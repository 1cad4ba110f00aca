"""The messages of streaming puts and gets, and the bytes in them: as they are, or as frames."""

from collections.abc import Callable, Iterator

import numpy as np

from kvstored.client.copying import Bytes, checksum_of
from kvstored.client.frames import Frames, Sending
from kvstored.client.links import PutPart
from kvstored.errors import Corrupt
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.bulk import FRAMES_VERSION
from kvstored.wire.packing import pack_u64

_DATA_BYTES = 1 << 20
"""Of one message: measured best between 1 and 4 MiB."""


def put_messages(part: PutPart, sending: Sending | None) -> Iterator[pb.PutRequest]:
    pieces = [(i, (source,)) for i, source in enumerate(part.sources) if source is not None]
    framed = sending.chosen(part.request, pieces) if sending is not None else []
    yield pb.PutRequest(reserve=part.request, frames=FRAMES_VERSION if framed else 0)
    checksums = [0] * len(part.sources)
    if sending is not None and framed:
        numbers = iter([i for i, _ in pieces])
        for view, checksum in sending.streamed(part.request.namespace, framed):
            yield from _cut(view)
            if checksum >= 0:
                checksums[next(numbers)] = checksum
    else:
        for i, (source,) in pieces:
            checksums[i] = checksum_of([source])
            yield from _cut(source)
    yield pb.PutRequest(checksums=pack_u64(checksums))


def _cut(source: Bytes) -> Iterator[pb.PutRequest]:
    for start in range(0, source.size, _DATA_BYTES):
        yield pb.PutRequest(data=source[start : start + _DATA_BYTES].tobytes())


class Outputs:
    """Filled in order from bytes that are cut anywhere."""

    def __init__(self, outputs: list[Bytes]) -> None:
        self._outputs = outputs
        self._place = self._offset = 0

    @property
    def is_full(self) -> bool:
        return self._place == len(self._outputs)

    def take(self, data: Bytes) -> None:
        while data.size:
            if self.is_full:
                raise Corrupt("the stream of a get has a tail")
            output = self._outputs[self._place]
            count = min(data.size, output.size - self._offset)
            np.copyto(output[self._offset : self._offset + count], data[:count])
            data, self._offset = data[count:], self._offset + count
            if self._offset == output.size:
                self._place, self._offset = self._place + 1, 0


def unframed(stream: Iterator[pb.GetResponse], flat: list[Bytes], frames: Frames) -> bool:
    """As `received`; False also where a frame is damaged: what follows it is not read."""
    outputs = Outputs(flat)
    take = frames.unframing([each.size for each in flat], outputs.take)
    try:
        return received(stream, outputs, take)
    except Corrupt:
        return False


def received(
    stream: Iterator[pb.GetResponse],
    outputs: Outputs,
    take: Callable[[Bytes], None] | None = None,
) -> bool:
    """Fills the outputs from the stream, however it is cut; False where the daemon says that a piece did not verify."""
    for message in stream:
        if message.failed:
            return False
        (take or outputs.take)(np.frombuffer(message.data, dtype=np.uint8))
    return outputs.is_full
