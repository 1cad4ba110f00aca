"""What `kvstored doctor` finds about the machine: memory, shared memory, descriptors, the disk and its filesystem.

A check returns findings and never raises for what it looks at; each finding says what to do.
"""

import errno
import fcntl
import mmap
import os
import resource
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvstored import machine, units
from kvstored.config import Config
from kvstored.sizing import MEMORY_RESERVE_MIN_BYTES, MEMORY_RESERVE_SHARE

_SEGMENT_FDS = 2
"""A segment and its table of records."""
_OTHER_FDS = 64
_BLOCK = 4096
INDEX = "index"
"""Of the LMDB environment within disk.path."""
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "glusterfs", "lustre"}
_VOLATILE = {"tmpfs", "ramfs"}


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy`: what to do; empty where nothing need be done."""

    name: str
    level: Level
    text: str
    remedy: str = ""


def memory(config: Config, limit: machine.MemoryLimit) -> list[Finding]:
    wanted = units.format_size(config.dram.capacity_bytes)
    facts = (
        f"dram.capacity {wanted}; limit {units.format_about(limit.limit_bytes)} ({limit.source}), "
        f"available {units.format_about(limit.available_bytes)}"
    )
    reserve_bytes = max(int(limit.limit_bytes * MEMORY_RESERVE_SHARE), MEMORY_RESERVE_MIN_BYTES)
    fits_bytes = max(limit.limit_bytes - reserve_bytes, 0)
    if config.dram.capacity_bytes > fits_bytes:
        at_most = units.format_about(fits_bytes)
        remedy = f"serve refuses it: at most {at_most} (--dram), or raise the container's limit"
        return [Finding("memory", Level.FAIL, facts, remedy)]
    if config.dram.capacity_bytes > limit.available_bytes:
        remedy = "the arena grows only as far as memory is free: lower dram.capacity or free some"
        return [Finding("memory", Level.WARN, facts, remedy)]
    return [Finding("memory", Level.OK, facts)]


def shared_memory(shm: Path = Path("/dev/shm")) -> list[Finding]:  # noqa: S108 - looked at, not written to
    """Segments are memfds, which no mount limits; engines of other processes may need /dev/shm."""
    findings = [_memfd()]
    if not shm.is_dir():
        text = f"{shm} is not there; kvstored does not need it, engines often do"
        remedy = "mount a tmpfs there (docker run --shm-size=1g)"
        return [*findings, Finding("shm", Level.WARN, text, remedy)]
    space = machine.disk_space(shm)
    total, free = map(units.format_about, (space.total_bytes, space.free_bytes))
    text = f"{shm}: {total}, {free} free; kvstored does not use it (memfd)"
    return [*findings, Finding("shm", Level.OK, text)]


def _memfd() -> Finding:
    try:
        fd = os.memfd_create("kvstored-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, 2**20)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            mmap.mmap(fd, 2**20).close()
        finally:
            os.close(fd)
    except OSError as error:
        text = f"sealed shared memory cannot be made: {error}"
        remedy = "needs Linux with memfd_create allowed: check the seccomp profile and memory limit"
        return Finding("memfd", Level.FAIL, text, remedy)
    return Finding("memfd", Level.OK, "sealed shared memory can be made, filled and mapped")


def descriptors(config: Config, soft_limit: int | None = None) -> list[Finding]:
    if soft_limit is None:
        soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    segments = -(-config.dram.capacity_bytes // config.dram.segment_effective_bytes)
    needed = segments * _SEGMENT_FDS + config.limits.sessions + _OTHER_FDS
    text = f"{soft_limit} open files allowed, up to {needed} needed ({segments} segments, {config.limits.sessions} sessions)"
    if soft_limit != resource.RLIM_INFINITY and soft_limit < needed:
        remedy = f"raise it (ulimit -n {needed}, LimitNOFILE=), or lower limits.sessions"
        return [Finding("open files", Level.WARN, text, remedy)]
    return [Finding("open files", Level.OK, text)]


# ---- disk


def disk(config: Config, mountinfo: Path = Path("/proc/self/mountinfo")) -> list[Finding]:
    if not config.disk.capacity_bytes:
        return [Finding("disk", Level.OK, "the NVMe tier is off (disk.capacity 0)")]
    existing = nearest_existing(config.disk.path)
    if not existing.is_dir():
        remedy = f"{existing} is no directory: move it away, or set another disk.path"
        return [Finding("disk", Level.FAIL, f"{config.disk.path} cannot be made", remedy)]
    if not os.access(existing, os.W_OK | os.X_OK):
        remedy = f"give this user the directory {existing}, or set another disk.path"
        return [Finding("disk", Level.FAIL, f"{config.disk.path} is not writable", remedy)]
    return [
        _space(config),
        filesystem(existing, mountinfo),
        _direct_io(config.disk.path, existing),
    ]


def nearest_existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def scratch_parent(path: Path) -> Path:
    """Where something may be written to try it: `path` where it is there, else the directory for temporary files. Never a parent of
    `path`, which is somebody else's (it may be `/`)."""
    return path if path.is_dir() else Path(tempfile.gettempdir())


def _space(config: Config) -> Finding:
    space = machine.disk_space(config.disk.path)
    own = machine.allocated_bytes(config.disk.path)
    wanted = units.format_size(config.disk.capacity_bytes)
    text = (
        f"disk.capacity {wanted}; {units.format_about(space.free_bytes)} free and "
        f"{units.format_about(own)} already ours on {space.filesystem}"
    )
    if config.disk.capacity_bytes > space.total_bytes:
        return Finding(
            "disk space", Level.FAIL, text, "lower disk.capacity (--disk), or set another disk.path"
        )
    if config.disk.capacity_bytes > space.free_bytes + own:
        remedy = "the tier fills only as far as there is room: lower disk.capacity or free some"
        return Finding("disk space", Level.WARN, text, remedy)
    return Finding("disk space", Level.OK, text)


def filesystem(directory: Path, mountinfo: Path) -> Finding:
    mount, kind = _mount_of(directory, mountinfo)
    text = f"{kind} mounted at {mount}"
    if kind in _NETWORK:
        remedy = "LMDB is not safe on network filesystems: set disk.path to a local disk"
        return Finding("filesystem", Level.FAIL, text, remedy)
    if kind in _VOLATILE:
        remedy = "it is memory, lost at reboot and counted twice: set disk.path to a disk"
        return Finding("filesystem", Level.WARN, text, remedy)
    if kind == "overlay":
        remedy = "it goes with the container: mount a volume and set disk.path or state_dir to it"
        return Finding("filesystem", Level.WARN, text, remedy)
    return Finding("filesystem", Level.OK, text)


def _mount_of(directory: Path, mountinfo: Path) -> tuple[str, str]:
    """Mount point and type: of the longest mount point above, the last mounted of equal ones."""
    best = ("/", "unknown")
    here = directory.resolve()
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return best
    for line in lines:
        left, dash, right = line.partition(" - ")
        words = left.split()
        if not dash or len(words) < 5:
            continue
        mount = words[4].replace("\\040", " ")
        if here.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, right.split()[0])
    return best


def _direct_io(path: Path, existing: Path) -> Finding:
    """Nothing is written to a parent of `path`: another directory tells as much where it is on the same filesystem."""
    scratch = scratch_parent(path)
    if scratch.stat().st_dev != existing.stat().st_dev:
        text = f"not tried: {path} is not there yet, and nothing is written to {existing}"
        return Finding("direct I/O", Level.OK, text)
    return direct_io(scratch)


def direct_io(directory: Path) -> Finding:
    """Writes one block around the page cache, in a file without a name where the filesystem can."""
    try:
        with tempfile.TemporaryDirectory(prefix=".kvstored-doctor-", dir=directory) as scratch:
            return _direct_io_in(Path(scratch) / "block")
    except OSError as error:
        remedy = f"free space on the filesystem of {directory}, or set another disk.path"
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            remedy = f"see that {directory} can be written to"
        return Finding("disk write", Level.FAIL, f"a test file cannot be written: {error}", remedy)


def _direct_io_in(path: Path) -> Finding:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _BLOCK)
        os.fdatasync(fd)
    finally:
        os.close(fd)
    block = mmap.mmap(-1, _BLOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
        try:
            os.pwritev(fd, [block], 0)
            os.preadv(fd, [block], 0)
        finally:
            os.close(fd)
    except OSError as error:
        text = f"no O_DIRECT here ({error.strerror}): reads and writes go through the page cache"
        remedy = "works, but slower and with the page cache charged: ext4 or XFS have O_DIRECT"
        return Finding("direct I/O", Level.WARN, text, remedy)
    return Finding("direct I/O", Level.OK, "O_DIRECT works")
