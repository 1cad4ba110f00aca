"""Blocks read in place, under a lease."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from kvstored.client.links import Leased
from kvstored.client.results import Block
from kvstored.core.calls import ReadStatus
from kvstored.errors import DeadlineExceeded, LeaseLost


class View:
    """Read-only arrays over the daemon's memory, `blocks`: one tuple a key, None for a miss.

    What they show is certain only when the view is left without LeaseLost. Arrays kept beyond that stay readable memory, but show
    whatever is written there later. Leaving it in a forked child raises LeaseLost: the lease is the parent's.
    """

    def __init__(
        self,
        leased: Leased,
        *,
        release: Callable[[Leased], bool],
        renew: Callable[[Leased, float], bool],
        wait: Callable[[Leased, int, int | None, float], int] = lambda _, layers, *__: layers,
    ) -> None:
        self._leased: Leased | None = leased
        self._release = release
        self._renew = renew
        self._wait = wait
        self.blocks: tuple[Block | None, ...] = leased.blocks
        self.status: tuple[ReadStatus, ...] = leased.status
        self.miss_reason: str = leased.miss_reason
        self.lossy: tuple[bool, ...] = (
            tuple(map(bool, leased.lossy)) if leased.lossy else (False,) * len(leased.status)
        )
        """One a key: whether the block is near what was put and not equal; `exact=True` makes such a block a miss."""

    @property
    def hits(self) -> int:
        return len(self.blocks) - self.blocks.count(None)

    @property
    def lease(self) -> int:
        """Its id, 0 where nothing was hit or it was released."""
        return self._leased.lease if self._leased is not None else 0

    def wait_layers(self, layers: int, *, stream: int | None = None, timeout_s: float = 5) -> None:
        """Until so many layers of every block, from the first on, are there: of a view by `map_gpu(layers=...)`; of others they are.

        With `stream` (a cudaStream_t as a number) only what is put on it from now on waits, where the daemon's events can be shared with this process.
        Raises DeadlineExceeded; Unavailable where the copy failed, and LeaseLost: then no layer that was not waited for is to be used.
        """
        if self._leased is None:
            raise LeaseLost("the lease of a view has ended")
        found = self._wait(self._leased, layers, stream, timeout_s)
        if found < layers:
            raise DeadlineExceeded(f"the layers are not there yet: layers={found} wanted={layers}")

    def renew(self, ttl_s: float) -> None:
        """From now on `ttl_s` more (bounded by the daemon); raises LeaseLost when it had ended."""
        if self._leased is None or (self._leased.lease and not self._renew(self._leased, ttl_s)):
            raise LeaseLost("the lease of a view has ended")

    def release(self) -> None:
        """Ends the lease; raises LeaseLost when it had ended before, so what was read is void. A second call does nothing."""
        leased, self._leased = self._leased, None
        if leased is not None:
            leased.settle()
        if leased is not None and leased.lease and not self._release(leased):
            raise LeaseLost("the lease of a view ended before the view: drop what was read")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.release()
        except LeaseLost:
            # The block's own exception already tells that nothing came of it.
            if error is None:
                raise
