"""Who takes part. A way of kvstored or a peer is one line here (a peer: and its adapter module)."""

from dataclasses import dataclass
from enum import Enum

from bench.peers.plan import COLD, GET, PUT, WARM


class Kind(Enum):
    LIMIT = "limit"
    """What nothing can beat, or a library within the process."""
    PEER = "peer"
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    module: str
    way: str = ""
    medium: str = WARM
    kind: Kind = Kind.LIMIT
    verbs: tuple[str, ...] = (PUT, GET)


COPY, COPY_2, SHARED, HASHED = "memory copy", "memory copy, 2 threads", "shm copy", "copy + xxh3"
ECHO = "echo + shm copy"
"""What a store with one message a call could reach at most."""
REDIS = "Redis"
OURS, VIEWS, POSTED = "kvstored", "kvstored views", "kvstored posted"
LEASED, UNCHECKED = "kvstored leased", "kvstored leased, unchecked"
OURS_COLD = "kvstored, disk"

CONTESTANTS = (
    Contestant(COPY, "copies", "private"),
    Contestant(COPY_2, "copies", "two threads"),
    Contestant(SHARED, "copies", "shared"),
    Contestant(HASHED, "copies", "shared hashed"),
    Contestant(ECHO, "copies", "shared echo"),
    Contestant("LMDB", "lmdb"),
    Contestant("files, tmpfs", "files", "tmpfs"),
    Contestant("files, page cache", "files", "disk"),
    Contestant(REDIS, "redis", kind=Kind.PEER),
    Contestant("Mooncake TCP", "mooncake", "tcp", kind=Kind.PEER),
    Contestant("Mooncake sidecar", "mooncake", "sidecar", kind=Kind.PEER),
    Contestant("OpenLake", "openlake", kind=Kind.PEER),
    Contestant("LMCache", "lmcache", kind=Kind.PEER),
    Contestant(OURS, "ours", "default", kind=Kind.OURS),
    Contestant(POSTED, "ours", "posted", kind=Kind.OURS, verbs=(PUT,)),
    Contestant(LEASED, "ours", "leased", kind=Kind.OURS, verbs=(GET,)),
    Contestant(UNCHECKED, "ours", "unchecked", kind=Kind.OURS, verbs=(GET,)),
    Contestant(VIEWS, "ours", "views", kind=Kind.OURS, verbs=(GET,)),
    Contestant("LMDB, disk", "lmdb", medium=COLD, verbs=(GET,)),
    Contestant("files, disk", "files", "disk", medium=COLD, verbs=(GET,)),
    Contestant(OURS_COLD, "ours", "default", COLD, Kind.OURS, (GET,)),
)
BY_NAME = {each.name: each for each in CONTESTANTS}
