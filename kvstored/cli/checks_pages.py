"""What `kvstored doctor` finds about pages and copies: huge pages, NUMA nodes, the C library's choice of stores, and whether the client copies in C.

Facts for who tunes a machine; none of them keeps the store from running.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from kvstored import native
from kvstored.cli.checks import Finding, Level
from kvstored.launch import NON_TEMPORAL


def pages(sys: Path = Path("/sys")) -> list[Finding]:
    return [_shared_huge(sys), _hugetlb(sys), _nodes(sys)]


def copies(environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Of this shell: an engine started from it inherits the same."""
    tunables = environ.get("GLIBC_TUNABLES", "").split(":")
    value = next((each.partition("=")[2] for each in tunables if _name(each) == NON_TEMPORAL), "")
    text = f"{NON_TEMPORAL}={value}" if value else f"{NON_TEMPORAL} is not set (GLIBC_TUNABLES)"
    return [Finding("copies", Level.OK, text), _in_c(native.state, is_there=bool(native.copies))]


def _in_c(state: str, *, is_there: bool) -> Finding:
    if is_there:
        return Finding("client in C", Level.OK, state)
    remedy = "install a C compiler and kvstored again; until then gets of a client are slower"
    return Finding("client in C", Level.WARN, state, remedy)


def _shared_huge(sys: Path) -> Finding:
    """Where the kernel gives them unasked (always, force, within_size) the arena has them, with advise where dram.huge_pages says so."""
    path = sys / "kernel/mm/transparent_hugepage/shmem_enabled"
    text = _text(path)
    chosen = text.partition("[")[2].partition("]")[0] or "unknown"
    return Finding("huge pages", Level.OK, f"transparent, for shared memory: {chosen}")


def _hugetlb(sys: Path) -> Finding:
    found = []
    for size in sorted((sys / "kernel/mm/hugepages").glob("hugepages-*kB")):
        total, free = _text(size / "nr_hugepages") or "0", _text(size / "free_hugepages") or "0"
        found.append(f"{size.name.removeprefix('hugepages-')}: {total} ({free} free)")
    reserved = ", ".join(found) or "none known to this kernel"
    return Finding("hugetlb", Level.OK, f"reserved: {reserved}; used with dram.huge_pages=hugetlb")


def _nodes(sys: Path) -> Finding:
    count = len(list((sys / "devices/system/node").glob("node[0-9]*")))
    if count <= 1:
        return Finding("NUMA", Level.OK, "one node")
    text = f"{count} nodes: a segment lies on the node of the daemon that committed it"
    remedy = "bind daemon and engines to one node (numactl), or interleave the daemon's memory"
    return Finding("NUMA", Level.WARN, text, remedy)


def _name(tunable: str) -> str:
    return tunable.partition("=")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
