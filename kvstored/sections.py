"""The sections of the configuration: every setting of them once, with type, unit, default, bound and one sentence.

The attribute of a size or duration ends in its unit (`dram.capacity_bytes`, `limits.fill_ttl_s`); its key does not, since its value names it.
"""

from typing import Literal, Self, TextIO

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvstored.fields import (
    GUESSES,
    AnyPath,
    AutoSize,
    Devices,
    Duration,
    Guesses,
    OptionalPath,
    Share,
    Size,
)
from kvstored.paging import HUGE_BYTES, HugePages


def key_of(field: str) -> str:
    return field if field.endswith("_per_s") else field.removesuffix("_bytes").removesuffix("_s")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", alias_generator=key_of)


LOSSY_PATTERN = (
    r"^(off|((^|,)([^,:=]+:)?(shared|cold)"
    r"=(int8|int4|int4-channel|fp4|rotated4|rotated3|rotated2|bounded64|bounded32|bounded16))+)$"
)
"""What `codec.levels` parses, which lies above: a test holds them together."""


def _check_watermarks(low: float, high: float) -> None:
    if not 0 < low <= high:
        raise ValueError(f"low must be above 0 and not above high: {low=} {high=}")


class Dram(Section):
    capacity_bytes: Size = Field(default=2**30, ge=2**20, description="shared memory for blocks")
    high: Share = Field(default=0.95, description="share in use above which blocks are evicted")
    low: Share = Field(default=0.90, description="share in use down to which blocks are evicted")
    segment_bytes: AutoSize = Field(
        default=None,
        ge=2**20,
        le=2**40,
        description="size of one segment; auto: capacity/64 within 64MiB..1GiB",
    )

    huge_pages: HugePages = Field(
        default=HugePages.OFF,
        description="advise: transparent ones; hugetlb: 2MiB each, which have to be reserved",
    )
    non_temporal_bytes: Size = Field(
        default=0,
        ge=0,
        description="copies from this size on go past the cache (x86, glibc); 0: the C library decides",
    )

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.huge_pages is HugePages.HUGETLB and self.segment_effective_bytes % HUGE_BYTES:
            raise ValueError("segment must be a multiple of 2MiB with huge_pages=hugetlb")
        return self

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_watermarks(self.low, self.high)
        if self.segment_bytes is not None and self.segment_bytes > self.capacity_bytes:
            raise ValueError("segment must not be above capacity")
        return self

    @property
    def segment_effective_bytes(self) -> int:
        """What `auto` means here, in whole allocation units."""
        if self.segment_bytes is not None:
            return self.segment_bytes // 4096 * 4096
        size_bytes = min(max(self.capacity_bytes // 64, 64 * 2**20), 2**30)
        return min(size_bytes, self.capacity_bytes) // 4096 * 4096


class Disk(Section):
    capacity_bytes: Size = Field(
        default=4 * 2**30, ge=0, description="space on disk for blocks; 0 turns the tier off"
    )
    path: AnyPath = Field(description="directory of the LMDB environment and the slab files")
    high: Share = Field(default=0.95, description="share in use above which blocks are evicted")
    low: Share = Field(default=0.90, description="share in use down to which blocks are evicted")
    codec: Literal["raw", "zstd", "fast", "small"] = Field(
        default="fast",
        description="how blocks are stored: fast and small choose for each KV group from its first block, raw where little is gained",
    )
    codec_level: int = Field(default=1, ge=1, le=19, description="level of the zstd codec")
    delta_min_context_tokens: int = Field(
        default=131_072,
        ge=0,
        description="tokens up to a block from which differences along tokens are tried too",
    )
    references: bool = Field(
        default=True,
        description="whether blocks of the same tokens behind another prompt are stored as what they differ by: half the space, twice the CPU of a load",
    )
    lossy: str = Field(
        default="off",
        pattern=LOSSY_PATTERN,
        description="how far from exact blocks of groups with lossy_ok are stored, by class: cold=int4,kv:shared=int8",
    )
    admit_hits: int = Field(
        default=1,
        ge=0,
        le=255,
        description="hits that a block needs for a disk above `high`; below: none",
    )
    write_budget_bytes: Size = Field(
        default=0,
        ge=0,
        description="bytes that may be written to the disk in 24 hours; 0: no bound",
    )
    min_benefit_bytes: Size = Field(
        default=0, ge=0, description="smallest prefix that is worth writing to the disk; 0: any"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_watermarks(self.low, self.high)
        return self


class Feedback(Section):
    """What engines report of attention."""

    blocks_per_s: int = Field(
        default=10_000, ge=0, description="reported blocks taken a second; 0 turns the signal off"
    )
    sink_steps: int = Field(
        default=64, ge=1, description="steps without a selection after which a block leaves earlier"
    )
    stable_steps: int = Field(
        default=8, ge=1, description="selections on end after which a block counts as used"
    )
    weights: OptionalPath = Field(
        default=None, description="what kvstored selection stats --weights wrote, or off"
    )
    log: OptionalPath = Field(
        default=None, description="file in which reports are recorded, at most 128MiB, or off"
    )


class Prefetch(Section):
    """Loading ahead of need."""

    signals: Guesses = Field(
        default=GUESSES,
        description="guesses that are loaded: some of selection,session,sibling, or off",
    )
    share: Share = Field(
        default=0.05, description="share of DRAM for what was loaded ahead and not used yet"
    )
    waste_max: Share = Field(
        default=0.5, description="share of a signal's blocks that may go unused before it is paused"
    )


Switch = Literal["auto", "on", "off"]


class Signals(Section):
    sinks: Switch = Field(
        default="auto",
        description="first blocks are exempt from eviction, up to limits.sink_share; auto: as the policy's bundle has it",
    )
    hints: Switch = Field(
        default="auto", description="the policy hears what engines say of a request"
    )
    disk: Switch = Field(
        default="auto", description="blocks are written to disk; else eviction drops them"
    )
    attention: Switch = Field(
        default="auto", description="what engines report of attention is heard"
    )
    guesses: Switch = Field(
        default="auto", description="what is likely to be asked for next is loaded ahead"
    )


class Hbm(Section):
    devices: Devices = Field(
        default=(),
        description="GPUs that hold blocks: ordinals such as 0,1, or off; host:0 is host memory that stands in for one",
    )
    capacity_bytes: Size = Field(
        default=2**30, ge=2**20, le=2**44, description="memory for blocks on each of them"
    )
    high: Share = Field(default=0.95, description="share in use above which blocks are evicted")
    low: Share = Field(
        default=0.90,
        description="share in use down to which blocks are evicted, and above which what nothing else has is carried to DRAM",
    )
    bandwidth_bytes: Size = Field(
        default=0,
        ge=0,
        description="a second that copies to and from each GPU may take from the engine's own; 0: no bound",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        _check_watermarks(self.low, self.high)
        return self


class Limits(Section):
    fill_ttl_s: Duration = Field(
        default=30, ge=0.1, le=3600, description="life of a right to write"
    )
    lease_ttl_s: Duration = Field(
        default=30,
        ge=0.1,
        le=3600,
        description="life of a right to read, when the caller names none",
    )
    lease_ttl_max_s: Duration = Field(
        default=600, ge=0.1, le=86400, description="longest life of a lease"
    )
    pin_ttl_max_s: Duration = Field(
        default=7 * 86400, ge=1, le=365 * 86400, description="longest life of a pin"
    )
    resume_ttl_s: Duration = Field(
        default=10, ge=0, le=3600, description="how long a session outlives its connection"
    )
    quarantine_s: Duration = Field(
        default=60, ge=0, le=86400, description="how long a late writer's space is kept unused"
    )
    lease_share: Share = Field(default=0.8, description="share of a tier that leases may hold")
    pin_share: Share = Field(default=0.5, description="share of a tier that pins may hold")
    sink_share: Share = Field(
        default=0.05, description="share of a tier where first blocks are exempt from eviction"
    )
    checkpoint_share: Share = Field(
        default=0.25, description="share of a tier for window and state groups"
    )
    checkpoint_ttl_s: Duration = Field(
        default=600, ge=1, le=7 * 86400, description="life of window and state copies"
    )
    sessions: int = Field(default=1024, ge=1, le=65536, description="sessions at once")
    leases_per_session: int = Field(
        default=65536, ge=1, le=2**20, description="leases of one session at once"
    )
    load_deadline_s: Duration = Field(
        default=5, ge=0.01, le=600, description="how long a read waits for its load from disk"
    )
    busy_poll_s: Duration = Field(
        default=0.001,
        ge=0,
        le=0.01,
        description="how long daemon and clients of its host stay awake for the next message where messages follow each other so closely; 0: never",
    )
    drain_s: Duration = Field(
        default=30, ge=0, le=3600, description="how long SIGTERM may flush dirty blocks to disk"
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lease_ttl_s > self.lease_ttl_max_s:
            raise ValueError("lease_ttl must not be above lease_ttl_max")
        return self


class BulkTls(Section):
    certificate: OptionalPath = Field(
        default=None, description="PEM certificate of the bulk channel; off: plain TCP"
    )
    key: OptionalPath = Field(default=None, description="PEM key; off: in the certificate's file")


class Wire(Section):
    """Bytes on their way to and from remote clients."""

    codec: Literal["auto", "raw", "lossless"] = Field(
        default="auto",
        description="frames on the wire: auto where a sample and the link say that they are faster, lossless wherever they are smaller, raw never",
    )
    link_bytes_per_s: Size = Field(
        default=0,
        ge=0,
        description="what the network carries, for codec auto; 0: measured by clients",
    )


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lines below it are dropped"
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto", description="auto: console on a terminal, else json"
    )

    def is_json(self, stream: TextIO) -> bool:
        return self.format == "json" or (self.format == "auto" and not stream.isatty())
