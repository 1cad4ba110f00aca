"""The errors that kvstored raises, each telling its caller what to do next.

Nothing here knows of gRPC, LMDB or sockets: those translate to and from these classes where they arise.
A miss is not an error, it is a result.
"""


class KvstoredError(Exception):
    """Base of all; the message is lower case, what failed and then `name=value` facts."""


class InvalidArgument(KvstoredError):
    """The call can never succeed as it is: correct the named value."""


class NamespaceMismatch(InvalidArgument):
    """An alias is open with another digest; the message holds the field-by-field difference."""


class NotFound(KvstoredError):
    """The named namespace, session, job, request or pin does not exist (any more)."""


class LeaseLost(KvstoredError):
    """A lease or fill ended (expired, released, or from before a restart): drop what was read or written under it."""


class NoSpace(KvstoredError):
    """Nothing evictable is left for this size, or a share is used up: store less, or free something."""


class Busy(KvstoredError):
    """A bounded queue is full, or the daemon drains: try again after a while."""


class Conflict(KvstoredError):
    """The compared generation is not the current one: read again."""


class DeadlineExceeded(KvstoredError):
    """The caller's deadline passed; what was begun goes on or is undone, nothing is half visible."""


class PermissionDenied(KvstoredError):
    """This caller may not do this: other tenant, or not allowed by the configuration."""


class Unavailable(KvstoredError):
    """The daemon (or the tier that this needs) is not reachable now: go on without it and reconnect."""


class Corrupt(KvstoredError):
    """Bytes do not match their checksum, or a record or frame cannot be understood: the copy is dropped, treat as a miss."""


class ConfigError(KvstoredError):
    """A setting is unknown, malformed or impossible on this machine: the message names it and a valid example."""


class StateMismatch(KvstoredError):
    """The state directory belongs to another version or to a running daemon: the message says which and what to do."""
