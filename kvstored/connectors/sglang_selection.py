"""Which pages the attention of finished requests selected, told to the daemon: from SGLang's top-k capturer, `--enable-return-indexer-topk`.

Models with a sparse indexer (DeepSeek V3.2, V4) choose a few thousand positions a token and layer. Pages that the last tokens of a request chose count as
used; the others sink by not being told of. Advice only: bounded, sampled, and nothing of SGLang waits for it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstored.client import Keys
from kvstored.connectors.guarded import GuardedNamespace
from kvstored.core.types import BATCH_KEYS_MAX

log = logging.getLogger("kvstored.connectors")

ROWS = 32
"""Tokens of a request that are looked at: its last ones, whose choice is nearest to the next turn's."""
WAITING_MAX = 16
"""Requests; more are not told of."""
_COLLECT = "_maybe_collect_indexer_topk"


class Request(Protocol):
    """What SGLang's `Req` has when it is done."""

    origin_input_ids: Sequence[int]
    output_ids_through_stop: Sequence[int]
    extra_key: str | None
    cache_salt: str | None
    indexer_topk: Any


@dataclass(frozen=True, slots=True)
class Selection:
    """`selected`: positions, in rows of `ratio` tokens, that the last tokens of this sequence chose; below 0 for none."""

    tokens: list[int]
    extra_key: str | None
    cache_salt: str | None
    selected: NDArray[np.int32]


def page_scores(
    selected: NDArray[np.int32], *, pages: int, page_tokens: int, ratio: int
) -> list[float]:
    """Of all choices, the share that lies in each page. Positions that no page has are left out."""
    rows = selected.reshape(-1)
    chosen = rows[rows >= 0].astype(np.int64) * ratio // page_tokens
    counts = np.bincount(chosen[chosen < pages], minlength=pages)
    return [float(share) for share in counts / max(counts.sum(), 1)]


class Selections:
    """`keys_of`: the keys of a sequence's whole pages, by SGLang's own hashes. Thread-safe; its thread begins with the first request."""

    def __init__(
        self,
        guarded: GuardedNamespace,
        keys_of: Callable[[Selection], Keys],
        *,
        page_tokens: int,
        ratio: int,
    ) -> None:
        self.told = 0
        self._guarded = guarded
        self._keys_of = keys_of
        self._page_tokens = page_tokens
        self._ratio = ratio
        self._waiting: deque[Selection] = deque(maxlen=WAITING_MAX)
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def finished(self, request: Request) -> None:
        """In SGLang's scheduler: copies the last rows and returns."""
        if request.indexer_topk is None:
            return
        selection = Selection(
            [*request.origin_input_ids, *request.output_ids_through_stop],
            request.extra_key,
            request.cache_salt,
            np.array(request.indexer_topk[-ROWS:], dtype=np.int32),
        )
        with self._changed:
            self._waiting.append(selection)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._run, name="kvstored-selection", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while (selection := self._next()) is not None:
            try:
                self._tell(selection)
            except Exception:
                log.exception("what attention selected could not be told")

    def _next(self) -> Selection | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return self._waiting.popleft() if self._waiting else None

    def _tell(self, selection: Selection) -> None:
        keys = self._keys_of(selection)[:BATCH_KEYS_MAX]
        if not len(keys):
            return
        scores = page_scores(
            selection.selected, pages=len(keys), page_tokens=self._page_tokens, ratio=self._ratio
        )
        self.told += self._guarded.attempt(
            lambda namespace: namespace.report(keys, scores), otherwise=0
        )


def follow(selections: Selections) -> Callable[[], None]:
    """From now on SGLang's scheduler tells of each request whose choices it collected; undone by what is returned. Raises AttributeError where
    this release of SGLang has no such place.
    """
    from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: PLC0415 - heavy
        SchedulerBatchResultProcessor,
    )

    collected = getattr(SchedulerBatchResultProcessor, _COLLECT)

    @wraps(collected)
    def collect_and_tell(processor: Any, req: Any) -> None:
        collected(processor, req)
        try:
            selections.finished(req)
        except Exception:
            log.exception("what attention selected could not be taken")

    setattr(SchedulerBatchResultProcessor, _COLLECT, collect_and_tell)
    return lambda: setattr(SchedulerBatchResultProcessor, _COLLECT, collected)
