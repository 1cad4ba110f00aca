"""Segments of the daemon's memory, mapped into this process.

A mapping ends when nothing refers to it any more: no explicit unmap, so that closing with live views is never an error. A new one is
prefaulted in the background.
"""

import mmap
import os
import threading
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kvstored.client.prefault import Prefaulter
from kvstored.errors import Corrupt, Unavailable
from kvstored.pb import kvstored_pb2 as pb

Bytes = NDArray[np.uint8]
Fetch = Callable[[int], tuple[pb.SegmentResponse, int]]


class Segments:
    """Segments by number, each mapped once. Thread-safe."""

    def __init__(self) -> None:
        self._mapped: tuple[int, dict[int, Bytes]] = 0, {}
        """Of one epoch; one value, so that nobody takes those of another one for it."""
        self._by_file: dict[tuple[int, int, int], Bytes] = {}
        self._lock = threading.Lock()
        self._prefaulter = Prefaulter()

    def mapped(self, segment: int, epoch: int, fetch: Fetch) -> Bytes:
        """The whole segment, writable; `fetch` asks the daemon for a descriptor of one not yet known in this epoch."""
        known = self.known(epoch).get(segment)
        if known is not None:
            return known
        with self._lock:
            if epoch != self._mapped[0]:
                self._mapped = epoch, {}
            mapped = self._mapped[1]
            if segment not in mapped:
                mapped[segment] = self._map(segment, fetch)
            return mapped[segment]

    def known(self, epoch: int) -> dict[int, Bytes]:
        """Those of this epoch that are mapped."""
        of, mapped = self._mapped
        return mapped if of == epoch else {}

    def clear(self) -> None:
        with self._lock:
            self._mapped = self._mapped[0], {}
            self._by_file = {}
            self._prefaulter.close()
            self._prefaulter = Prefaulter()

    def _map(self, segment: int, fetch: Fetch) -> Bytes:
        facts, descriptor = fetch(segment)
        try:
            status = os.fstat(descriptor)
            if status.st_size < facts.bytes or facts.bytes == 0:
                raise Corrupt(f"segment is smaller than told segment={segment}")
            # A restarted daemon keeps its memory: the same file need not be mapped again.
            file = (status.st_dev, status.st_ino, facts.bytes)
            if file not in self._by_file:
                # The mapping's buffer holds it open; descriptors are closed at once, of which a process has few.
                mapping = mmap.mmap(descriptor, facts.bytes, mmap.MAP_SHARED)
                self._by_file[file] = np.frombuffer(mapping, dtype=np.uint8)
                self._prefaulter.add(self._by_file[file])
            return self._by_file[file]
        except (OSError, ValueError) as error:
            raise Unavailable(f"segment cannot be mapped segment={segment}: {error}") from error
        finally:
            os.close(descriptor)


def extent_of(segments: Mapping[int, Bytes], segment: int, offset: int, length: int) -> Bytes:
    """An extent in the mapped segments; one outside of them is the daemon's fault, and caught here."""
    extent = segments[segment][offset : offset + length]
    if offset < 0 or extent.size != length:
        raise Corrupt(f"a place lies outside its segment segment={segment} offset={offset}")
    return extent
