"""Clients of a kvstored daemon: numpy arrays in and out, through shared memory on one host, by gRPC from others.

Imports only numpy, xxhash and protobuf, and grpc when an address asks for it.
"""

from kvstored.client.aio import AsyncClient, AsyncNamespace
from kvstored.client.client import Client
from kvstored.client.keys import Keys
from kvstored.client.namespace import Namespace
from kvstored.client.results import (
    AccessReport,
    GetResult,
    Job,
    Located,
    OptimisticReads,
    Pinned,
    Posted,
    PutResult,
)
from kvstored.client.scatter import Gather
from kvstored.client.view import View
from kvstored.core.advice import LoadQuestion, PrefillRun
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.core.hints import FollowUp, Hint
from kvstored.core.tags import Tag
from kvstored.core.types import (
    Access,
    Advice,
    CheckpointPolicy,
    GroupKind,
    GroupSpec,
    Match,
    NamespaceSpec,
)
from kvstored.errors import (
    Busy,
    Conflict,
    Corrupt,
    DeadlineExceeded,
    InvalidArgument,
    KvstoredError,
    LeaseLost,
    NamespaceMismatch,
    NoSpace,
    NotFound,
    PermissionDenied,
    Unavailable,
)

__all__ = [
    "Access",
    "AccessReport",
    "Advice",
    "AsyncClient",
    "AsyncNamespace",
    "Busy",
    "CheckpointPolicy",
    "Client",
    "Conflict",
    "Corrupt",
    "DeadlineExceeded",
    "FillStatus",
    "FollowUp",
    "Gather",
    "GetResult",
    "GroupKind",
    "GroupSpec",
    "Hint",
    "InvalidArgument",
    "Job",
    "Keys",
    "KvstoredError",
    "LeaseLost",
    "LoadQuestion",
    "Located",
    "Match",
    "Namespace",
    "NamespaceMismatch",
    "NamespaceSpec",
    "NoSpace",
    "NotFound",
    "OptimisticReads",
    "PermissionDenied",
    "Pinned",
    "Posted",
    "PrefillRun",
    "PutResult",
    "ReadStatus",
    "Tag",
    "Unavailable",
    "View",
]
