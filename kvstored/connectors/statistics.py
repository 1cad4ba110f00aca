"""What a connector did, in numbers that an engine can export. Counting takes a lock for a dictionary update, nothing else."""

import threading
from collections.abc import Mapping
from enum import StrEnum


class Stat(StrEnum):
    """Names end in their unit; all only grow."""

    LOOKUPS = "lookups"
    LOOKUP_TOKENS = "lookup_tokens"
    """Tokens that were asked for."""
    LOOKUP_SECONDS = "lookup_seconds"
    HIT_HBM_TOKENS = "hit_hbm_tokens"
    HIT_DRAM_TOKENS = "hit_dram_tokens"
    HIT_NVME_TOKENS = "hit_nvme_tokens"
    HIT_REMOTE_TOKENS = "hit_remote_tokens"
    LOADS = "loads"
    LOADED_BLOCKS = "loaded_blocks"
    LOADED_BYTES = "loaded_bytes"
    LOAD_MISSED_BLOCKS = "load_missed_blocks"
    """Asked for, mostly after a lookup had found them, and not loaded: the engine computes them."""
    LOAD_CORRUPT_BLOCKS = "load_corrupt_blocks"
    LOAD_SECONDS = "load_seconds"
    STORES = "stores"
    STORED_BLOCKS = "stored_blocks"
    """That are there now, by this store or before it."""
    STORED_BYTES = "stored_bytes"
    """Of blocks that this connector wrote."""
    STORE_SECONDS = "store_seconds"
    STAGED_SECONDS = "staged_seconds"
    """The engine's own time, for copies that are stored in the background."""
    SHED_QUEUE_BLOCKS = "shed_queue_blocks"
    """Not stored since the queue was full."""
    SHED_SPACE_BLOCKS = "shed_space_blocks"
    """Not stored since the daemon had no room for them, or another writer was at it."""
    SHED_AWAY_BLOCKS = "shed_away_blocks"
    """Not stored since the daemon was away."""
    SKIPPED_CALLS = "skipped_calls"
    """Answered without asking, while the daemon was away."""
    UNAVAILABLE_ERRORS = "unavailable_errors"
    TIMEOUT_ERRORS = "timeout_errors"
    OTHER_ERRORS = "other_errors"
    OUTAGES = "outages"
    """Changes from up to away."""


HIT_TIER_TOKENS = (
    Stat.HIT_HBM_TOKENS,
    Stat.HIT_DRAM_TOKENS,
    Stat.HIT_NVME_TOKENS,
    Stat.HIT_REMOTE_TOKENS,
)
"""By TierId."""


class Statistics:
    """Totals since the start, and since they were last taken. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def count(self, stat: Stat, amount: float = 1) -> None:
        if not amount:
            return
        with self._lock:
            for counted in (self._totals, self._since):
                counted[stat] = counted.get(stat, 0) + amount

    def totals(self) -> dict[str, float]:
        """Every name, zeros too."""
        with self._lock:
            return {stat.value: self._totals.get(stat, 0) for stat in Stat}

    def take(self) -> Mapping[str, float]:
        """What was counted since the last time, without zeros."""
        with self._lock:
            taken, self._since = self._since, {}
        return {str(name): amount for name, amount in taken.items()}
