from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINEAR: _ClassVar[GroupKind]
    COMPRESSED: _ClassVar[GroupKind]
    WINDOW: _ClassVar[GroupKind]
    STATE: _ClassVar[GroupKind]

class Access(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DENSE: _ClassVar[Access]
    SPARSE: _ClassVar[Access]

class CheckpointPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BOUNDARY: _ClassVar[CheckpointPolicy]
    FULL: _ClassVar[CheckpointPolicy]
    PERIODIC: _ClassVar[CheckpointPolicy]
    NONE: _ClassVar[CheckpointPolicy]

class FollowUp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FOLLOW_UP_UNKNOWN: _ClassVar[FollowUp]
    TOOL_USE: _ClassVar[FollowUp]
    END_TURN: _ClassVar[FollowUp]

class FillStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILL_UNKNOWN: _ClassVar[FillStatus]
    GRANTED: _ClassVar[FillStatus]
    PRESENT: _ClassVar[FillStatus]
    IN_PROGRESS: _ClassVar[FillStatus]
    NO_SPACE: _ClassVar[FillStatus]
    COMMITTED: _ClassVar[FillStatus]
    LOST: _ClassVar[FillStatus]

class ReadStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    READ_UNKNOWN: _ClassVar[ReadStatus]
    HIT: _ClassVar[ReadStatus]
    MISS: _ClassVar[ReadStatus]
    PENDING: _ClassVar[ReadStatus]

class PinStrength(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SOFT: _ClassVar[PinStrength]
    HARD: _ClassVar[PinStrength]

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_UNKNOWN: _ClassVar[JobState]
    RUNNING: _ClassVar[JobState]
    DONE: _ClassVar[JobState]
    CANCELLED: _ClassVar[JobState]
    EXPIRED: _ClassVar[JobState]
    FAILED: _ClassVar[JobState]

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CACHE: _ClassVar[Outcome]
    DISCARD: _ClassVar[Outcome]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_UNKNOWN: _ClassVar[EventKind]
    STORED: _ClassVar[EventKind]
    EVICTED: _ClassVar[EventKind]
    LOADED: _ClassVar[EventKind]
    REMOVED: _ClassVar[EventKind]
    CLEARED: _ClassVar[EventKind]
    CORRUPTED: _ClassVar[EventKind]
    EVENTS_LOST: _ClassVar[EventKind]
    NAMESPACE_OPENED: _ClassVar[EventKind]
    NAMESPACE_REMOVED: _ClassVar[EventKind]
    JOB_DONE: _ClassVar[EventKind]
    LOAD_FAILED: _ClassVar[EventKind]

class HandleKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_SHARED: _ClassVar[HandleKind]
    CUDA_IPC: _ClassVar[HandleKind]
    HOST_FILE: _ClassVar[HandleKind]
LINEAR: GroupKind
COMPRESSED: GroupKind
WINDOW: GroupKind
STATE: GroupKind
DENSE: Access
SPARSE: Access
BOUNDARY: CheckpointPolicy
FULL: CheckpointPolicy
PERIODIC: CheckpointPolicy
NONE: CheckpointPolicy
FOLLOW_UP_UNKNOWN: FollowUp
TOOL_USE: FollowUp
END_TURN: FollowUp
FILL_UNKNOWN: FillStatus
GRANTED: FillStatus
PRESENT: FillStatus
IN_PROGRESS: FillStatus
NO_SPACE: FillStatus
COMMITTED: FillStatus
LOST: FillStatus
READ_UNKNOWN: ReadStatus
HIT: ReadStatus
MISS: ReadStatus
PENDING: ReadStatus
SOFT: PinStrength
HARD: PinStrength
JOB_UNKNOWN: JobState
RUNNING: JobState
DONE: JobState
CANCELLED: JobState
EXPIRED: JobState
FAILED: JobState
CACHE: Outcome
DISCARD: Outcome
EVENT_UNKNOWN: EventKind
STORED: EventKind
EVICTED: EventKind
LOADED: EventKind
REMOVED: EventKind
CLEARED: EventKind
CORRUPTED: EventKind
EVENTS_LOST: EventKind
NAMESPACE_OPENED: EventKind
NAMESPACE_REMOVED: EventKind
JOB_DONE: EventKind
LOAD_FAILED: EventKind
NOT_SHARED: HandleKind
CUDA_IPC: HandleKind
HOST_FILE: HandleKind

class OpenSessionRequest(_message.Message):
    __slots__ = ("client", "resume_token", "resume_ttl_ms", "protocol", "detached")
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESUME_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    client: str
    resume_token: bytes
    resume_ttl_ms: int
    protocol: int
    detached: bool
    def __init__(self, client: _Optional[str] = ..., resume_token: _Optional[bytes] = ..., resume_ttl_ms: _Optional[int] = ..., protocol: _Optional[int] = ..., detached: _Optional[bool] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("token", "epoch", "resumed", "resume_ttl_ms", "keys_max", "piece_bytes_max", "daemon_pid", "version", "quarantined", "local_socket", "host", "bulk_port", "bulk_host", "bulk_id", "bulk_certificate", "projection", "busy_poll_us", "frames")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    RESUME_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    KEYS_MAX_FIELD_NUMBER: _ClassVar[int]
    PIECE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    DAEMON_PID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    BULK_PORT_FIELD_NUMBER: _ClassVar[int]
    BULK_HOST_FIELD_NUMBER: _ClassVar[int]
    BULK_ID_FIELD_NUMBER: _ClassVar[int]
    BULK_CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_FIELD_NUMBER: _ClassVar[int]
    BUSY_POLL_US_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    epoch: int
    resumed: bool
    resume_ttl_ms: int
    keys_max: int
    piece_bytes_max: int
    daemon_pid: int
    version: str
    quarantined: bool
    local_socket: str
    host: str
    bulk_port: int
    bulk_host: str
    bulk_id: bytes
    bulk_certificate: bytes
    projection: bool
    busy_poll_us: int
    frames: Frames
    def __init__(self, token: _Optional[bytes] = ..., epoch: _Optional[int] = ..., resumed: _Optional[bool] = ..., resume_ttl_ms: _Optional[int] = ..., keys_max: _Optional[int] = ..., piece_bytes_max: _Optional[int] = ..., daemon_pid: _Optional[int] = ..., version: _Optional[str] = ..., quarantined: _Optional[bool] = ..., local_socket: _Optional[str] = ..., host: _Optional[str] = ..., bulk_port: _Optional[int] = ..., bulk_host: _Optional[str] = ..., bulk_id: _Optional[bytes] = ..., bulk_certificate: _Optional[bytes] = ..., projection: _Optional[bool] = ..., busy_poll_us: _Optional[int] = ..., frames: _Optional[_Union[Frames, _Mapping]] = ...) -> None: ...

class Frames(_message.Message):
    __slots__ = ("version", "always", "link_bytes_per_s", "decoders")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ALWAYS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODERS_FIELD_NUMBER: _ClassVar[int]
    version: int
    always: bool
    link_bytes_per_s: int
    decoders: int
    def __init__(self, version: _Optional[int] = ..., always: _Optional[bool] = ..., link_bytes_per_s: _Optional[int] = ..., decoders: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("epoch", "session_expires_unix_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SESSION_EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    session_expires_unix_ms: int
    def __init__(self, epoch: _Optional[int] = ..., session_expires_unix_ms: _Optional[int] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    def __init__(self, session: _Optional[bytes] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Group(_message.Message):
    __slots__ = ("name", "kind", "bytes_per_block", "ratio", "window_tokens", "per_block", "access", "sharded", "lossy_ok", "resident", "retention_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ACCESS_FIELD_NUMBER: _ClassVar[int]
    SHARDED_FIELD_NUMBER: _ClassVar[int]
    LOSSY_OK_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_FIELD_NUMBER: _ClassVar[int]
    RETENTION_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: GroupKind
    bytes_per_block: int
    ratio: int
    window_tokens: int
    per_block: bool
    access: Access
    sharded: bool
    lossy_ok: bool
    resident: bool
    retention_s: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[GroupKind, str]] = ..., bytes_per_block: _Optional[int] = ..., ratio: _Optional[int] = ..., window_tokens: _Optional[int] = ..., per_block: _Optional[bool] = ..., access: _Optional[_Union[Access, str]] = ..., sharded: _Optional[bool] = ..., lossy_ok: _Optional[bool] = ..., resident: _Optional[bool] = ..., retention_s: _Optional[int] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("model", "revision", "dtype", "layout", "layout_version", "block_tokens", "groups", "tp", "pp", "tenant", "engine_page_tokens", "sink_tokens", "recent_tokens", "checkpoint_policy", "checkpoint_period_tokens", "mutable", "flops_base", "flops_slope")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    PP_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SINK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_POLICY_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_PERIOD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MUTABLE_FIELD_NUMBER: _ClassVar[int]
    FLOPS_BASE_FIELD_NUMBER: _ClassVar[int]
    FLOPS_SLOPE_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    dtype: str
    layout: str
    layout_version: int
    block_tokens: int
    groups: _containers.RepeatedCompositeFieldContainer[Group]
    tp: int
    pp: int
    tenant: str
    engine_page_tokens: int
    sink_tokens: int
    recent_tokens: int
    checkpoint_policy: CheckpointPolicy
    checkpoint_period_tokens: int
    mutable: bool
    flops_base: float
    flops_slope: float
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., dtype: _Optional[str] = ..., layout: _Optional[str] = ..., layout_version: _Optional[int] = ..., block_tokens: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[Group, _Mapping]]] = ..., tp: _Optional[int] = ..., pp: _Optional[int] = ..., tenant: _Optional[str] = ..., engine_page_tokens: _Optional[int] = ..., sink_tokens: _Optional[int] = ..., recent_tokens: _Optional[int] = ..., checkpoint_policy: _Optional[_Union[CheckpointPolicy, str]] = ..., checkpoint_period_tokens: _Optional[int] = ..., mutable: _Optional[bool] = ..., flops_base: _Optional[float] = ..., flops_slope: _Optional[float] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "supersede")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDE_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    supersede: bool
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., supersede: _Optional[bool] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("digest", "namespace", "created")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    namespace: Namespace
    created: bool
    def __init__(self, digest: _Optional[bytes] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., created: _Optional[bool] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceInfo]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceInfo, _Mapping]]] = ...) -> None: ...

class NamespaceInfo(_message.Message):
    __slots__ = ("digest", "namespace", "alias", "retired", "blocks", "tier_bytes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    RETIRED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TIER_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    namespace: Namespace
    alias: str
    retired: bool
    blocks: int
    tier_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digest: _Optional[bytes] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., alias: _Optional[str] = ..., retired: _Optional[bool] = ..., blocks: _Optional[int] = ..., tier_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class RetireNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class RetireNamespaceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveNamespaceRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class RemoveNamespaceResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class Keys(_message.Message):
    __slots__ = ("packed", "key_bytes", "parent", "parents", "unchained", "extra_keys")
    PACKED_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    UNCHAINED_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEYS_FIELD_NUMBER: _ClassVar[int]
    packed: bytes
    key_bytes: int
    parent: bytes
    parents: bytes
    unchained: bool
    extra_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, packed: _Optional[bytes] = ..., key_bytes: _Optional[int] = ..., parent: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., unchained: _Optional[bool] = ..., extra_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class MatchRequest(_message.Message):
    __slots__ = ("namespace", "keys", "last_valid_tokens", "session", "advise", "deadline_ms", "prefill_tokens_per_s", "prefill_flops_per_s", "conversation", "exact")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    LAST_VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ADVISE_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FLOPS_PER_S_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: Keys
    last_valid_tokens: int
    session: bytes
    advise: bool
    deadline_ms: int
    prefill_tokens_per_s: float
    prefill_flops_per_s: float
    conversation: str
    exact: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., last_valid_tokens: _Optional[int] = ..., session: _Optional[bytes] = ..., advise: _Optional[bool] = ..., deadline_ms: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., prefill_flops_per_s: _Optional[float] = ..., conversation: _Optional[str] = ..., exact: _Optional[bool] = ...) -> None: ...

class Advice(_message.Message):
    __slots__ = ("load_bytes", "load_s", "queue_s", "total_load_s", "prefill_s", "prefill_source", "split_blocks", "split_tokens", "split_s", "overlap_blocks", "overlap_s", "deadline_blocks", "deadline_tokens")
    LOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LOAD_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SOURCE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_S_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_S_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    load_bytes: _containers.RepeatedScalarFieldContainer[int]
    load_s: _containers.RepeatedScalarFieldContainer[float]
    queue_s: float
    total_load_s: float
    prefill_s: float
    prefill_source: str
    split_blocks: int
    split_tokens: int
    split_s: float
    overlap_blocks: int
    overlap_s: float
    deadline_blocks: int
    deadline_tokens: int
    def __init__(self, load_bytes: _Optional[_Iterable[int]] = ..., load_s: _Optional[_Iterable[float]] = ..., queue_s: _Optional[float] = ..., total_load_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., prefill_source: _Optional[str] = ..., split_blocks: _Optional[int] = ..., split_tokens: _Optional[int] = ..., split_s: _Optional[float] = ..., overlap_blocks: _Optional[int] = ..., overlap_s: _Optional[float] = ..., deadline_blocks: _Optional[int] = ..., deadline_tokens: _Optional[int] = ...) -> None: ...

class MatchResponse(_message.Message):
    __slots__ = ("hit_blocks", "hit_tokens", "checkpoint_tokens", "replay_tokens", "tier_blocks", "miss_reason", "advice", "lossy_blocks")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    LOSSY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    hit_tokens: int
    checkpoint_tokens: int
    replay_tokens: int
    tier_blocks: _containers.RepeatedScalarFieldContainer[int]
    miss_reason: str
    advice: Advice
    lossy_blocks: int
    def __init__(self, hit_blocks: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., checkpoint_tokens: _Optional[int] = ..., replay_tokens: _Optional[int] = ..., tier_blocks: _Optional[_Iterable[int]] = ..., miss_reason: _Optional[str] = ..., advice: _Optional[_Union[Advice, _Mapping]] = ..., lossy_blocks: _Optional[int] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("namespace", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: Keys
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("tiers", "generations")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    tiers: bytes
    generations: bytes
    def __init__(self, tiers: _Optional[bytes] = ..., generations: _Optional[bytes] = ...) -> None: ...

class Hint(_message.Message):
    __slots__ = ("follow_up", "output_tokens", "session", "category", "priority", "retention_s")
    FOLLOW_UP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_S_FIELD_NUMBER: _ClassVar[int]
    follow_up: FollowUp
    output_tokens: int
    session: str
    category: str
    priority: int
    retention_s: int
    def __init__(self, follow_up: _Optional[_Union[FollowUp, str]] = ..., output_tokens: _Optional[int] = ..., session: _Optional[str] = ..., category: _Optional[str] = ..., priority: _Optional[int] = ..., retention_s: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session", "namespace", "shard", "keys", "groups", "sizes", "last_valid_tokens", "fill_ttl_ms", "request_id", "ends_path", "hint", "content_keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    LAST_VALID_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FILL_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENDS_PATH_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_KEYS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    shard: int
    keys: Keys
    groups: int
    sizes: bytes
    last_valid_tokens: int
    fill_ttl_ms: int
    request_id: bytes
    ends_path: bool
    hint: Hint
    content_keys: bytes
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., shard: _Optional[int] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., groups: _Optional[int] = ..., sizes: _Optional[bytes] = ..., last_valid_tokens: _Optional[int] = ..., fill_ttl_ms: _Optional[int] = ..., request_id: _Optional[bytes] = ..., ends_path: _Optional[bool] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ..., content_keys: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("status", "fills", "extent_counts", "extents", "sizes")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    status: bytes
    fills: bytes
    extent_counts: bytes
    extents: bytes
    sizes: bytes
    def __init__(self, status: _Optional[bytes] = ..., fills: _Optional[bytes] = ..., extent_counts: _Optional[bytes] = ..., extents: _Optional[bytes] = ..., sizes: _Optional[bytes] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session", "fills", "checksums", "next")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    fills: bytes
    checksums: bytes
    next: ReserveRequest
    def __init__(self, session: _Optional[bytes] = ..., fills: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., next: _Optional[_Union[ReserveRequest, _Mapping]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("status", "next")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    status: bytes
    next: ReserveResponse
    def __init__(self, status: _Optional[bytes] = ..., next: _Optional[_Union[ReserveResponse, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session", "fills")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    fills: bytes
    def __init__(self, session: _Optional[bytes] = ..., fills: _Optional[bytes] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetAsideRequest(_message.Message):
    __slots__ = ("session", "namespace", "count")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    count: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., count: _Optional[int] = ...) -> None: ...

class SetAsideResponse(_message.Message):
    __slots__ = ("first", "extents")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    first: int
    extents: bytes
    def __init__(self, first: _Optional[int] = ..., extents: _Optional[bytes] = ...) -> None: ...

class PutAsideRequest(_message.Message):
    __slots__ = ("reserve", "places", "checksums")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    reserve: ReserveRequest
    places: bytes
    checksums: bytes
    def __init__(self, reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., places: _Optional[bytes] = ..., checksums: _Optional[bytes] = ...) -> None: ...

class PutAsideResponse(_message.Message):
    __slots__ = ("stored",)
    STORED_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    def __init__(self, stored: _Optional[bool] = ...) -> None: ...

class ReplaceIfRequest(_message.Message):
    __slots__ = ("reserve", "generations")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    reserve: ReserveRequest
    generations: bytes
    def __init__(self, reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., generations: _Optional[bytes] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session", "namespace", "shard", "keys", "groups", "lease_ttl_ms", "no_wait", "deadline_ms", "release", "tier", "exact", "layers", "frames", "decoders", "link_bytes_per_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DECODERS_FIELD_NUMBER: _ClassVar[int]
    LINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    shard: int
    keys: Keys
    groups: int
    lease_ttl_ms: int
    no_wait: bool
    deadline_ms: int
    release: bytes
    tier: str
    exact: bool
    layers: int
    frames: int
    decoders: int
    link_bytes_per_s: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., shard: _Optional[int] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., groups: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., no_wait: _Optional[bool] = ..., deadline_ms: _Optional[int] = ..., release: _Optional[bytes] = ..., tier: _Optional[str] = ..., exact: _Optional[bool] = ..., layers: _Optional[int] = ..., frames: _Optional[int] = ..., decoders: _Optional[int] = ..., link_bytes_per_s: _Optional[int] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease", "status", "extent_counts", "extents", "sizes", "checksums", "generations", "must_verify", "miss_reason", "tiers", "released_lost", "arriving", "lossy", "frames")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    EXTENT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    MUST_VERIFY_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_LOST_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    lease: int
    status: bytes
    extent_counts: bytes
    extents: bytes
    sizes: bytes
    checksums: bytes
    generations: bytes
    must_verify: bytes
    miss_reason: str
    tiers: bytes
    released_lost: bytes
    arriving: bool
    lossy: bytes
    frames: int
    def __init__(self, lease: _Optional[int] = ..., status: _Optional[bytes] = ..., extent_counts: _Optional[bytes] = ..., extents: _Optional[bytes] = ..., sizes: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., must_verify: _Optional[bytes] = ..., miss_reason: _Optional[str] = ..., tiers: _Optional[bytes] = ..., released_lost: _Optional[bytes] = ..., arriving: _Optional[bool] = ..., lossy: _Optional[bytes] = ..., frames: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("session", "leases", "lease_ttl_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    leases: bytes
    lease_ttl_ms: int
    def __init__(self, session: _Optional[bytes] = ..., leases: _Optional[bytes] = ..., lease_ttl_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: bytes
    def __init__(self, lost: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session", "leases")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    leases: bytes
    def __init__(self, session: _Optional[bytes] = ..., leases: _Optional[bytes] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: bytes
    def __init__(self, lost: _Optional[bytes] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("reserve", "data", "checksums", "frames")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    reserve: ReserveRequest
    data: bytes
    checksums: bytes
    frames: int
    def __init__(self, reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., data: _Optional[bytes] = ..., checksums: _Optional[bytes] = ..., frames: _Optional[int] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: bytes
    def __init__(self, status: _Optional[bytes] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("acquire",)
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    acquire: AcquireRequest
    def __init__(self, acquire: _Optional[_Union[AcquireRequest, _Mapping]] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("head", "data", "failed")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    head: AcquireResponse
    data: bytes
    failed: bool
    def __init__(self, head: _Optional[_Union[AcquireResponse, _Mapping]] = ..., data: _Optional[bytes] = ..., failed: _Optional[bool] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys", "strength", "ttl_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    STRENGTH_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    keys: Keys
    strength: PinStrength
    ttl_s: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., strength: _Optional[_Union[PinStrength, str]] = ..., ttl_s: _Optional[int] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin", "blocks", "bytes")
    PIN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    pin: int
    blocks: int
    bytes: int
    def __init__(self, pin: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: int
    def __init__(self, pin: _Optional[int] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class PrefetchRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys", "tier", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    keys: Keys
    tier: str
    deadline_ms: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., tier: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class PrefetchResponse(_message.Message):
    __slots__ = ("job", "blocks")
    JOB_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    job: int
    blocks: int
    def __init__(self, job: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class ReserveBandwidthRequest(_message.Message):
    __slots__ = ("session", "bytes_per_s", "ttl_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    bytes_per_s: int
    ttl_ms: int
    def __init__(self, session: _Optional[bytes] = ..., bytes_per_s: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReserveBandwidthResponse(_message.Message):
    __slots__ = ("left_bytes_per_s",)
    LEFT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    left_bytes_per_s: int
    def __init__(self, left_bytes_per_s: _Optional[int] = ...) -> None: ...

class JobStatusRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: int
    def __init__(self, job: _Optional[int] = ...) -> None: ...

class CancelJobRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: int
    def __init__(self, job: _Optional[int] = ...) -> None: ...

class JobStatusResponse(_message.Message):
    __slots__ = ("state", "blocks_done", "blocks_failed", "blocks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FAILED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    state: JobState
    blocks_done: int
    blocks_failed: int
    blocks: int
    def __init__(self, state: _Optional[_Union[JobState, str]] = ..., blocks_done: _Optional[int] = ..., blocks_failed: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class BeginRequestRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys", "request_id", "hint", "load_deadline_ms", "for_transfer", "batch")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    LOAD_DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    FOR_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    keys: Keys
    request_id: bytes
    hint: Hint
    load_deadline_ms: int
    for_transfer: bool
    batch: bytes
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., request_id: _Optional[bytes] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ..., load_deadline_ms: _Optional[int] = ..., for_transfer: _Optional[bool] = ..., batch: _Optional[bytes] = ...) -> None: ...

class BeginRequestResponse(_message.Message):
    __slots__ = ("request_id", "match")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MATCH_FIELD_NUMBER: _ClassVar[int]
    request_id: bytes
    match: MatchResponse
    def __init__(self, request_id: _Optional[bytes] = ..., match: _Optional[_Union[MatchResponse, _Mapping]] = ...) -> None: ...

class ExtendRequestRequest(_message.Message):
    __slots__ = ("session", "request_id", "keys")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    request_id: bytes
    keys: Keys
    def __init__(self, session: _Optional[bytes] = ..., request_id: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class ExtendRequestResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class CompleteRequestRequest(_message.Message):
    __slots__ = ("session", "request_id", "outcome", "hint", "prefill_tokens", "prefill_first_token", "prefill_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    request_id: bytes
    outcome: Outcome
    hint: Hint
    prefill_tokens: int
    prefill_first_token: int
    prefill_s: float
    def __init__(self, session: _Optional[bytes] = ..., request_id: _Optional[bytes] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ..., prefill_tokens: _Optional[int] = ..., prefill_first_token: _Optional[int] = ..., prefill_s: _Optional[float] = ...) -> None: ...

class CompleteRequestResponse(_message.Message):
    __slots__ = ("dropped_blocks",)
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    dropped_blocks: int
    def __init__(self, dropped_blocks: _Optional[int] = ...) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("namespace", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: Keys
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class TouchRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys", "read", "hint")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    HINT_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    keys: Keys
    read: bool
    hint: Hint
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., read: _Optional[bool] = ..., hint: _Optional[_Union[Hint, _Mapping]] = ...) -> None: ...

class TouchResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys", "scores", "group")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    keys: Keys
    scores: _containers.RepeatedScalarFieldContainer[float]
    group: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., scores: _Optional[_Iterable[float]] = ..., group: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ScheduleRequest(_message.Message):
    __slots__ = ("dry_run", "rows_max")
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    rows_max: int
    def __init__(self, dry_run: _Optional[bool] = ..., rows_max: _Optional[int] = ...) -> None: ...

class ScheduleResponse(_message.Message):
    __slots__ = ("objectives", "tiers", "page_ins", "evictions", "writes", "cut", "running_requests", "evicted_copies", "load_bytes", "write_bytes")
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PAGE_INS_FIELD_NUMBER: _ClassVar[int]
    EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_COPIES_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BYTES_FIELD_NUMBER: _ClassVar[int]
    objectives: _containers.RepeatedScalarFieldContainer[str]
    tiers: _containers.RepeatedCompositeFieldContainer[TierRoom]
    page_ins: _containers.RepeatedCompositeFieldContainer[PageIn]
    evictions: _containers.RepeatedCompositeFieldContainer[NodeMove]
    writes: _containers.RepeatedCompositeFieldContainer[NodeMove]
    cut: bool
    running_requests: int
    evicted_copies: int
    load_bytes: int
    write_bytes: int
    def __init__(self, objectives: _Optional[_Iterable[str]] = ..., tiers: _Optional[_Iterable[_Union[TierRoom, _Mapping]]] = ..., page_ins: _Optional[_Iterable[_Union[PageIn, _Mapping]]] = ..., evictions: _Optional[_Iterable[_Union[NodeMove, _Mapping]]] = ..., writes: _Optional[_Iterable[_Union[NodeMove, _Mapping]]] = ..., cut: _Optional[bool] = ..., running_requests: _Optional[int] = ..., evicted_copies: _Optional[int] = ..., load_bytes: _Optional[int] = ..., write_bytes: _Optional[int] = ...) -> None: ...

class TierRoom(_message.Message):
    __slots__ = ("name", "granted_bytes", "used_bytes", "free_bytes", "high_bytes", "low_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIGH_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    granted_bytes: int
    used_bytes: int
    free_bytes: int
    high_bytes: int
    low_bytes: int
    def __init__(self, name: _Optional[str] = ..., granted_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., high_bytes: _Optional[int] = ..., low_bytes: _Optional[int] = ...) -> None: ...

class PageIn(_message.Message):
    __slots__ = ("namespace", "head_fingerprint", "blocks", "bytes", "tier", "signal", "deadline_in_s", "ready_in_s", "loading")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_IN_S_FIELD_NUMBER: _ClassVar[int]
    READY_IN_S_FIELD_NUMBER: _ClassVar[int]
    LOADING_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    head_fingerprint: bytes
    blocks: int
    bytes: int
    tier: str
    signal: str
    deadline_in_s: float
    ready_in_s: float
    loading: bool
    def __init__(self, namespace: _Optional[bytes] = ..., head_fingerprint: _Optional[bytes] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., tier: _Optional[str] = ..., signal: _Optional[str] = ..., deadline_in_s: _Optional[float] = ..., ready_in_s: _Optional[float] = ..., loading: _Optional[bool] = ...) -> None: ...

class NodeMove(_message.Message):
    __slots__ = ("namespace", "head_fingerprint", "depth_blocks", "blocks", "bytes", "tier", "decision", "why")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    head_fingerprint: bytes
    depth_blocks: int
    blocks: int
    bytes: int
    tier: str
    decision: str
    why: str
    def __init__(self, namespace: _Optional[bytes] = ..., head_fingerprint: _Optional[bytes] = ..., depth_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., tier: _Optional[str] = ..., decision: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ReportAccessRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys", "group", "layer", "steps", "selected", "mass", "tags")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SELECTED_FIELD_NUMBER: _ClassVar[int]
    MASS_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    keys: Keys
    group: int
    layer: int
    steps: int
    selected: bytes
    mass: _containers.RepeatedScalarFieldContainer[float]
    tags: bytes
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., group: _Optional[int] = ..., layer: _Optional[int] = ..., steps: _Optional[int] = ..., selected: _Optional[bytes] = ..., mass: _Optional[_Iterable[float]] = ..., tags: _Optional[bytes] = ...) -> None: ...

class ReportAccessResponse(_message.Message):
    __slots__ = ("taken", "blocks", "raised", "wanted")
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RAISED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    blocks: int
    raised: int
    wanted: int
    def __init__(self, taken: _Optional[bool] = ..., blocks: _Optional[int] = ..., raised: _Optional[int] = ..., wanted: _Optional[int] = ...) -> None: ...

class ReportResidentRequest(_message.Message):
    __slots__ = ("session", "namespace", "keys", "deadline_ms")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    namespace: bytes
    keys: Keys
    deadline_ms: int
    def __init__(self, session: _Optional[bytes] = ..., namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class ReportResidentResponse(_message.Message):
    __slots__ = ("wanted",)
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: int
    def __init__(self, wanted: _Optional[int] = ...) -> None: ...

class ReportBulkRequest(_message.Message):
    __slots__ = ("received_bytes", "sent_bytes", "opened", "refused", "failures", "connections", "received_frames", "sent_frames")
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FRAMES_FIELD_NUMBER: _ClassVar[int]
    SENT_FRAMES_FIELD_NUMBER: _ClassVar[int]
    received_bytes: int
    sent_bytes: int
    opened: int
    refused: int
    failures: int
    connections: int
    received_frames: FrameBytes
    sent_frames: FrameBytes
    def __init__(self, received_bytes: _Optional[int] = ..., sent_bytes: _Optional[int] = ..., opened: _Optional[int] = ..., refused: _Optional[int] = ..., failures: _Optional[int] = ..., connections: _Optional[int] = ..., received_frames: _Optional[_Union[FrameBytes, _Mapping]] = ..., sent_frames: _Optional[_Union[FrameBytes, _Mapping]] = ...) -> None: ...

class AcquireStoredRequest(_message.Message):
    __slots__ = ("acquire",)
    ACQUIRE_FIELD_NUMBER: _ClassVar[int]
    acquire: AcquireRequest
    def __init__(self, acquire: _Optional[_Union[AcquireRequest, _Mapping]] = ...) -> None: ...

class AcquireStoredResponse(_message.Message):
    __slots__ = ("found", "plain_sizes", "stored_checksums", "folder")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PLAIN_SIZES_FIELD_NUMBER: _ClassVar[int]
    STORED_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    found: AcquireResponse
    plain_sizes: bytes
    stored_checksums: bytes
    folder: str
    def __init__(self, found: _Optional[_Union[AcquireResponse, _Mapping]] = ..., plain_sizes: _Optional[bytes] = ..., stored_checksums: _Optional[bytes] = ..., folder: _Optional[str] = ...) -> None: ...

class FrameBytes(_message.Message):
    __slots__ = ("plain_bytes", "wire_bytes")
    PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    plain_bytes: int
    wire_bytes: int
    def __init__(self, plain_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ...) -> None: ...

class ReportBulkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("version", "daemon_pid", "keeper_pid", "front_pid", "epoch", "uptime_s", "state", "tiers", "blocks", "tree_nodes", "sessions", "leases", "fills", "pins", "requests", "recovering", "counters", "policy", "what_if")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DAEMON_PID_FIELD_NUMBER: _ClassVar[int]
    KEEPER_PID_FIELD_NUMBER: _ClassVar[int]
    FRONT_PID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RECOVERING_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    WHAT_IF_FIELD_NUMBER: _ClassVar[int]
    version: str
    daemon_pid: int
    keeper_pid: int
    front_pid: int
    epoch: int
    uptime_s: float
    state: str
    tiers: _containers.RepeatedCompositeFieldContainer[TierStat]
    blocks: int
    tree_nodes: int
    sessions: int
    leases: int
    fills: int
    pins: int
    requests: int
    recovering: bool
    counters: _containers.ScalarMap[str, float]
    policy: str
    what_if: WhatIf
    def __init__(self, version: _Optional[str] = ..., daemon_pid: _Optional[int] = ..., keeper_pid: _Optional[int] = ..., front_pid: _Optional[int] = ..., epoch: _Optional[int] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., tiers: _Optional[_Iterable[_Union[TierStat, _Mapping]]] = ..., blocks: _Optional[int] = ..., tree_nodes: _Optional[int] = ..., sessions: _Optional[int] = ..., leases: _Optional[int] = ..., fills: _Optional[int] = ..., pins: _Optional[int] = ..., requests: _Optional[int] = ..., recovering: _Optional[bool] = ..., counters: _Optional[_Mapping[str, float]] = ..., policy: _Optional[str] = ..., what_if: _Optional[_Union[WhatIf, _Mapping]] = ...) -> None: ...

class WhatIf(_message.Message):
    __slots__ = ("span_s", "blocks", "flops", "sampled_share", "points")
    SPAN_S_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_SHARE_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    span_s: float
    blocks: float
    flops: float
    sampled_share: float
    points: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    def __init__(self, span_s: _Optional[float] = ..., blocks: _Optional[float] = ..., flops: _Optional[float] = ..., sampled_share: _Optional[float] = ..., points: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("capacity_bytes", "blocks", "flops")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    blocks: float
    flops: float
    def __init__(self, capacity_bytes: _Optional[int] = ..., blocks: _Optional[float] = ..., flops: _Optional[float] = ...) -> None: ...

class TierStat(_message.Message):
    __slots__ = ("name", "capacity_bytes", "granted_bytes", "used_bytes", "copies", "dirty_copies", "leased_bytes", "pinned_bytes", "quarantined_bytes", "fragmentation", "state", "recovered", "codec", "codec_ratio", "aside_bytes", "groups", "reason", "written_day_bytes", "write_budget_bytes", "write_state", "kept_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    GRANTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    DIRTY_COPIES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    RECOVERED_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    CODEC_RATIO_FIELD_NUMBER: _ClassVar[int]
    ASIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_DAY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITE_STATE_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    capacity_bytes: int
    granted_bytes: int
    used_bytes: int
    copies: int
    dirty_copies: int
    leased_bytes: int
    pinned_bytes: int
    quarantined_bytes: int
    fragmentation: float
    state: str
    recovered: int
    codec: str
    codec_ratio: float
    aside_bytes: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupCodec]
    reason: str
    written_day_bytes: int
    write_budget_bytes: int
    write_state: str
    kept_bytes: int
    def __init__(self, name: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., granted_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., copies: _Optional[int] = ..., dirty_copies: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., fragmentation: _Optional[float] = ..., state: _Optional[str] = ..., recovered: _Optional[int] = ..., codec: _Optional[str] = ..., codec_ratio: _Optional[float] = ..., aside_bytes: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupCodec, _Mapping]]] = ..., reason: _Optional[str] = ..., written_day_bytes: _Optional[int] = ..., write_budget_bytes: _Optional[int] = ..., write_state: _Optional[str] = ..., kept_bytes: _Optional[int] = ...) -> None: ...

class GroupCodec(_message.Message):
    __slots__ = ("namespace", "group", "plan", "plain_bytes", "stored_bytes", "p_plain_bytes", "p_stored_bytes", "encode_s", "decoded_bytes", "decode_s")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    P_PLAIN_BYTES_FIELD_NUMBER: _ClassVar[int]
    P_STORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    group: str
    plan: str
    plain_bytes: int
    stored_bytes: int
    p_plain_bytes: int
    p_stored_bytes: int
    encode_s: float
    decoded_bytes: int
    decode_s: float
    def __init__(self, namespace: _Optional[bytes] = ..., group: _Optional[str] = ..., plan: _Optional[str] = ..., plain_bytes: _Optional[int] = ..., stored_bytes: _Optional[int] = ..., p_plain_bytes: _Optional[int] = ..., p_stored_bytes: _Optional[int] = ..., encode_s: _Optional[float] = ..., decoded_bytes: _Optional[int] = ..., decode_s: _Optional[float] = ...) -> None: ...

class TreeRequest(_message.Message):
    __slots__ = ("namespace", "keys", "nodes_max")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    NODES_MAX_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: Keys
    nodes_max: int
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ..., nodes_max: _Optional[int] = ...) -> None: ...

class TreeResponse(_message.Message):
    __slots__ = ("nodes", "cut")
    NODES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[TreeNode]
    cut: bool
    def __init__(self, nodes: _Optional[_Iterable[_Union[TreeNode, _Mapping]]] = ..., cut: _Optional[bool] = ...) -> None: ...

class TreeNode(_message.Message):
    __slots__ = ("id", "parent", "head_fingerprint", "depth_blocks", "blocks", "tokens", "children", "holds", "hits", "heat", "tier_blocks", "namespace")
    ID_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    HEAT_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    id: int
    parent: int
    head_fingerprint: bytes
    depth_blocks: int
    blocks: int
    tokens: int
    children: int
    holds: int
    hits: int
    heat: str
    tier_blocks: _containers.RepeatedScalarFieldContainer[int]
    namespace: bytes
    def __init__(self, id: _Optional[int] = ..., parent: _Optional[int] = ..., head_fingerprint: _Optional[bytes] = ..., depth_blocks: _Optional[int] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., children: _Optional[int] = ..., holds: _Optional[int] = ..., hits: _Optional[int] = ..., heat: _Optional[str] = ..., tier_blocks: _Optional[_Iterable[int]] = ..., namespace: _Optional[bytes] = ...) -> None: ...

class LeasesRequest(_message.Message):
    __slots__ = ("max",)
    MAX_FIELD_NUMBER: _ClassVar[int]
    max: int
    def __init__(self, max: _Optional[int] = ...) -> None: ...

class LeasesResponse(_message.Message):
    __slots__ = ("leases", "cut")
    LEASES_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    leases: _containers.RepeatedCompositeFieldContainer[LeaseInfo]
    cut: bool
    def __init__(self, leases: _Optional[_Iterable[_Union[LeaseInfo, _Mapping]]] = ..., cut: _Optional[bool] = ...) -> None: ...

class LeaseInfo(_message.Message):
    __slots__ = ("kind", "id", "client", "blocks", "bytes", "age_s", "expires_in_s", "state")
    KIND_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    id: int
    client: str
    blocks: int
    bytes: int
    age_s: float
    expires_in_s: float
    state: str
    def __init__(self, kind: _Optional[str] = ..., id: _Optional[int] = ..., client: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., age_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ..., state: _Optional[str] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "keys")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: Keys
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[_Union[Keys, _Mapping]] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedCompositeFieldContainer[Explanation]
    def __init__(self, keys: _Optional[_Iterable[_Union[Explanation, _Mapping]]] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("key", "verdict", "text", "tiers")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    verdict: str
    text: str
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[bytes] = ..., verdict: _Optional[str] = ..., text: _Optional[str] = ..., tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("namespace", "cursor", "blocks_max")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    cursor: int
    blocks_max: int
    def __init__(self, namespace: _Optional[bytes] = ..., cursor: _Optional[int] = ..., blocks_max: _Optional[int] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("cursor", "done", "blocks", "bytes", "corrupt", "blocks_total")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    done: bool
    blocks: int
    bytes: int
    corrupt: int
    blocks_total: int
    def __init__(self, cursor: _Optional[int] = ..., done: _Optional[bool] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., corrupt: _Optional[int] = ..., blocks_total: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "epoch", "kind", "namespace", "key", "parent_fingerprint", "tier", "unix_s", "job", "depth_blocks")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    UNIX_S_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    DEPTH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    kind: EventKind
    namespace: bytes
    key: bytes
    parent_fingerprint: bytes
    tier: str
    unix_s: float
    job: int
    depth_blocks: int
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., namespace: _Optional[bytes] = ..., key: _Optional[bytes] = ..., parent_fingerprint: _Optional[bytes] = ..., tier: _Optional[str] = ..., unix_s: _Optional[float] = ..., job: _Optional[int] = ..., depth_blocks: _Optional[int] = ...) -> None: ...

class PollEventsRequest(_message.Message):
    __slots__ = ("epoch", "cursor", "events_max", "wait_ms")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    EVENTS_MAX_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cursor: int
    events_max: int
    wait_ms: int
    def __init__(self, epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., events_max: _Optional[int] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class PollEventsResponse(_message.Message):
    __slots__ = ("events", "epoch", "cursor", "lost")
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[Event]
    epoch: int
    cursor: int
    lost: bool
    def __init__(self, events: _Optional[_Iterable[_Union[Event, _Mapping]]] = ..., epoch: _Optional[int] = ..., cursor: _Optional[int] = ..., lost: _Optional[bool] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("epoch", "cursor")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    cursor: int
    def __init__(self, epoch: _Optional[int] = ..., cursor: _Optional[int] = ...) -> None: ...

class SegmentRequest(_message.Message):
    __slots__ = ("segment",)
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    segment: int
    def __init__(self, segment: _Optional[int] = ...) -> None: ...

class ProjectionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProjectionResponse(_message.Message):
    __slots__ = ("bytes", "epoch")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    epoch: int
    def __init__(self, bytes: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SegmentResponse(_message.Message):
    __slots__ = ("segment", "bytes", "incarnation")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    segment: int
    bytes: int
    incarnation: int
    def __init__(self, segment: _Optional[int] = ..., bytes: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GpuPoolRequest(_message.Message):
    __slots__ = ("segment",)
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    segment: int
    def __init__(self, segment: _Optional[int] = ...) -> None: ...

class GpuPoolResponse(_message.Message):
    __slots__ = ("segment", "pool_bytes", "epoch", "kind", "handle", "device")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    segment: int
    pool_bytes: int
    epoch: int
    kind: HandleKind
    handle: bytes
    device: bytes
    def __init__(self, segment: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., epoch: _Optional[int] = ..., kind: _Optional[_Union[HandleKind, str]] = ..., handle: _Optional[bytes] = ..., device: _Optional[bytes] = ...) -> None: ...

class WaitLayersRequest(_message.Message):
    __slots__ = ("session", "lease", "layers", "wait_ms", "events")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    session: bytes
    lease: int
    layers: int
    wait_ms: int
    events: bool
    def __init__(self, session: _Optional[bytes] = ..., lease: _Optional[int] = ..., layers: _Optional[int] = ..., wait_ms: _Optional[int] = ..., events: _Optional[bool] = ...) -> None: ...

class WaitLayersResponse(_message.Message):
    __slots__ = ("layers", "events")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    layers: int
    events: _containers.RepeatedCompositeFieldContainer[LayerEvent]
    def __init__(self, layers: _Optional[int] = ..., events: _Optional[_Iterable[_Union[LayerEvent, _Mapping]]] = ...) -> None: ...

class LayerEvent(_message.Message):
    __slots__ = ("segment", "handle")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    segment: int
    handle: bytes
    def __init__(self, segment: _Optional[int] = ..., handle: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "message")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...
