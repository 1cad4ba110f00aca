"""Doctor's lines about pages and copies, on machines made of files."""

from pathlib import Path

import pytest

from kvstored import native
from kvstored.cli import checks_pages
from kvstored.cli.checks import Finding, Level


def machine(root: Path, *, shmem: str = "", nodes: int = 1) -> Path:
    huge = root / "kernel/mm/transparent_hugepage"
    huge.mkdir(parents=True)
    (huge / "shmem_enabled").write_text(shmem)
    size = root / "kernel/mm/hugepages/hugepages-2048kB"
    size.mkdir(parents=True)
    (size / "nr_hugepages").write_text("512\n")
    (size / "free_hugepages").write_text("500\n")
    for number in range(nodes):
        (root / f"devices/system/node/node{number}").mkdir(parents=True)
    return root


def named(found: list[Finding], name: str) -> Finding:
    return next(each for each in found if each.name == name)


def test_what_the_kernel_chose_and_reserved_is_told(tmp_path: Path) -> None:
    found = checks_pages.pages(machine(tmp_path, shmem="always within_size [advise] never"))
    assert named(found, "huge pages").text.endswith(": advise")
    assert "2048kB: 512 (500 free)" in named(found, "hugetlb").text
    assert all(each.level is Level.OK for each in found)


def test_several_nodes_are_a_warning_with_a_remedy(tmp_path: Path) -> None:
    found = named(checks_pages.pages(machine(tmp_path, nodes=2)), "NUMA")
    assert (found.level, found.text[:7]) == (Level.WARN, "2 nodes")
    assert "numactl" in found.remedy


def test_a_machine_that_tells_nothing_is_no_failure(tmp_path: Path) -> None:
    found = checks_pages.pages(tmp_path)
    assert named(found, "huge pages").text.endswith("unknown")
    assert all(each.level is Level.OK for each in found)


@pytest.mark.parametrize(
    ("tunables", "text"),
    [
        ("", "is not set"),
        ("glibc.malloc.check=1", "is not set"),
        (f"glibc.malloc.check=1:{checks_pages.NON_TEMPORAL}=0x40000", "=0x40000"),
    ],
)
def test_the_non_temporal_threshold_is_told(tunables: str, text: str) -> None:
    assert text in checks_pages.copies({"GLIBC_TUNABLES": tunables})[0].text


def test_whether_the_client_copies_in_c_is_told() -> None:
    assert named(checks_pages.copies({}), "client in C").text == native.state
    found = checks_pages._in_c("not built: no module", is_there=False)
    assert (found.level, found.text) == (Level.WARN, "not built: no module")
    assert "compiler" in found.remedy
