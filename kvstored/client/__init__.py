"""Clients of a kvstored daemon: numpy arrays in and out, through shared memory on one host, by gRPC from others.

Imports only numpy, xxhash and protobuf, and grpc when an address asks for it.
"""

from kvstored.client.aio import AsyncClient, AsyncNamespace
from kvstored.client.client import Client
from kvstored.client.keys import Keys
from kvstored.client.namespace import Namespace
from kvstored.client.results import GetResult, Job, Located, Pinned, PutResult
from kvstored.client.view import View
from kvstored.core.calls import FillStatus, ReadStatus
from kvstored.core.types import GroupKind, GroupSpec, Match, NamespaceSpec

__all__ = [
    "AsyncClient",
    "AsyncNamespace",
    "Client",
    "FillStatus",
    "GetResult",
    "GroupKind",
    "GroupSpec",
    "Job",
    "Keys",
    "Located",
    "Match",
    "Namespace",
    "NamespaceSpec",
    "Pinned",
    "PutResult",
    "ReadStatus",
    "View",
]
