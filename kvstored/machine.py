"""What this machine (or container) lets a process have: memory by cgroup v1, v2 and the kernel, disk by the filesystem.

Facts only: who asks decides what to do about them. Roots are arguments so that every cgroup layout can be tested. The one act: to give
back what the allocator keeps.
"""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 2**60
"""cgroup v1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The tightest limit on this process, what is left under it, and where it comes from."""

    limit_bytes: int
    available_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class DiskSpace:
    total_bytes: int
    free_bytes: int
    filesystem: str
    """Of the nearest existing directory."""


def give_back_free_memory() -> bool:
    """Have the C library return its free pages to the kernel; False where it cannot. Takes milliseconds.

    Tables that grew to a million rows leave holes of a third of their size in glibc's heap (247 bytes a block, 188 after this).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    return trim is not None and bool(trim(0))


def memory_limit(
    *, proc: Path = Path("/proc"), sys_cgroup: Path = Path("/sys/fs/cgroup")
) -> MemoryLimit:
    """Shared memory segments are charged to the cgroup that touches them first, so its limit counts, not only the machine's."""
    meminfo = _meminfo(proc / "meminfo")
    total, available, source = meminfo["MemTotal"], meminfo["MemAvailable"], "machine"
    for directory, names in _memory_cgroups(proc, sys_cgroup):
        limit = _number(directory / names.limit)
        if limit is None or limit >= _UNLIMITED_BYTES:
            continue
        if limit < total:
            total, source = limit, f"cgroup {directory / names.limit}"
        used = _number(directory / names.usage) or 0
        clean = _stat_field(directory / "memory.stat", names.inactive_file)
        available = min(available, max(limit - used + clean, 0))
    return MemoryLimit(total, available, source)


def disk_space(path: Path) -> DiskSpace:
    """Of the filesystem that `path` is or would be on; reserved blocks do not count as free."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    stat = os.statvfs(existing)
    return DiskSpace(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, str(existing))


def lies_in_memory(path: Path, *, mounts: Path = Path("/proc/self/mounts")) -> bool:
    """Whether files there take memory: on a tmpfs, say. False where that cannot be told."""
    where, found = path.absolute(), ("", "")
    for line in _text(mounts).splitlines():
        _, mounted, kind, *_ = [*line.split(), "", "", ""]
        point = mounted.replace("\\040", " ")
        if len(point) >= len(found[0]) and where.is_relative_to(point or "/nowhere"):
            found = point, kind
    return found[1] in ("tmpfs", "ramfs")


def allocated_bytes(directory: Path) -> int:
    """Disk blocks that files directly in `directory` hold now; 0 when there is no such directory."""
    if not directory.is_dir():
        return 0
    return sum(path.stat().st_blocks * 512 for path in directory.iterdir() if path.is_file())


@dataclass(frozen=True, slots=True)
class _Names:
    limit: str
    usage: str
    inactive_file: str


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def _memory_cgroups(proc: Path, sys_cgroup: Path) -> list[tuple[Path, _Names]]:
    """This process's memory cgroups from its own up to the root: a parent may be tighter.

    In a container the path in /proc/self/cgroup may be the host's, which is not there: then the mount's root is the own one.
    """
    found: list[tuple[Path, _Names]] = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, names = sys_cgroup / "memory", _V1
        elif controllers == "":
            unified = sys_cgroup / "unified"
            root, names = (unified if unified.is_dir() else sys_cgroup), _V2
        else:
            continue
        own = root / path.lstrip("/")
        while own != root and root in own.parents:
            found.append((own, names))
            own = own.parent
        found.append((root, names))
    return found


def _meminfo(path: Path) -> dict[str, int]:
    fields = (line.split() for line in _text(path).splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3}


def _stat_field(path: Path, field: str) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == field:
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
