"""The one map between errors, status numbers of the local channel and gRPC codes, in both
directions.

gRPC codes are named here and not imported: a client on the same host never loads grpc.
"""

from dataclasses import dataclass

from google.protobuf.message import DecodeError

from kvstored import errors
from kvstored.errors import KvstoredError
from kvstored.pb import kvstored_pb2 as pb

OK = 0
ERROR_DETAIL_KEY = "kvstored-error-bin"
"""gRPC trailing metadata that holds a serialized Failure."""


@dataclass(frozen=True, slots=True)
class Status:
    number: int
    error: type[KvstoredError]
    grpc_code: str


STATUSES = (
    Status(1, KvstoredError, "INTERNAL"),
    Status(2, errors.InvalidArgument, "INVALID_ARGUMENT"),
    Status(3, errors.NamespaceMismatch, "ALREADY_EXISTS"),
    Status(4, errors.NotFound, "NOT_FOUND"),
    Status(5, errors.LeaseLost, "FAILED_PRECONDITION"),
    Status(6, errors.NoSpace, "RESOURCE_EXHAUSTED"),
    Status(7, errors.Busy, "UNAVAILABLE"),
    Status(8, errors.Conflict, "ABORTED"),
    Status(9, errors.DeadlineExceeded, "DEADLINE_EXCEEDED"),
    Status(10, errors.PermissionDenied, "PERMISSION_DENIED"),
    Status(11, errors.Unavailable, "UNAVAILABLE"),
    Status(12, errors.Corrupt, "DATA_LOSS"),
    Status(13, errors.ConfigError, "INTERNAL"),
    Status(14, errors.StateMismatch, "INTERNAL"),
)

BY_NUMBER = {status.number: status for status in STATUSES}
BY_ERROR = {status.error: status for status in STATUSES}
BY_KIND = {status.error.__name__: status for status in STATUSES}

_BY_GRPC_CODE: dict[str, type[KvstoredError]] = {
    "CANCELLED": errors.Unavailable,
    "UNKNOWN": KvstoredError,
    "INVALID_ARGUMENT": errors.InvalidArgument,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.NamespaceMismatch,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "RESOURCE_EXHAUSTED": errors.NoSpace,
    "FAILED_PRECONDITION": errors.LeaseLost,
    "ABORTED": errors.Conflict,
    "OUT_OF_RANGE": errors.InvalidArgument,
    "UNIMPLEMENTED": errors.InvalidArgument,
    "INTERNAL": KvstoredError,
    "UNAVAILABLE": errors.Unavailable,
    "DATA_LOSS": errors.Corrupt,
    "UNAUTHENTICATED": errors.PermissionDenied,
}
"""For failures without our detail: of the network, of a proxy, of grpc itself."""


def status_of(error: KvstoredError) -> Status:
    """The status of the error's class, or of its nearest base that has one."""
    for kind in type(error).__mro__:
        if kind in BY_ERROR:
            return BY_ERROR[kind]
    raise AssertionError(f"no status for {type(error)}")


def failure_of(error: KvstoredError) -> pb.Failure:
    return pb.Failure(kind=status_of(error).error.__name__, message=str(error))


def error_of(number: int, payload: bytes) -> KvstoredError:
    """The error that a failed answer of the local channel stands for."""
    status = BY_NUMBER.get(number, BY_NUMBER[1])
    return status.error(_failure(payload).message or f"the call failed status={number}")


def error_of_grpc(code: str, details: str, payload: bytes | None) -> KvstoredError:
    """The error that a failed gRPC call stands for; `payload` is its detail, if it has one."""
    if payload is not None:
        failure = _failure(payload)
        if failure.kind in BY_KIND:
            return BY_KIND[failure.kind].error(failure.message)
    return _BY_GRPC_CODE.get(code, KvstoredError)(f"{details or 'the call failed'} code={code}")


def _failure(payload: bytes) -> pb.Failure:
    try:
        return pb.Failure.FromString(payload)
    except DecodeError:
        return pb.Failure(message=f"the detail of a failure is unreadable bytes={len(payload)}")
