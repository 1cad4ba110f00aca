"""A disk tier as version 1 wrote it: index and slab, raw and zstd pieces, one of them scattered. It must open and read for ever.

Made once by `python -m tests.tiers.test_golden_disk`; a later format adds a file of its own beside it.
"""

import tarfile
import tempfile
from pathlib import Path

from kvstored.clock import ManualClock
from kvstored.codec.frame import Codec
from kvstored.tiers.disk import Disk, Options
from tests.tiers.conformance import (
    content,
    piece,
    read_one,
    run_of,
    same_bytes,
    scan_all,
    scattered,
    write_one,
)

GOLDEN = Path(__file__).parent / "golden" / "disk-v1.tar.gz"
OPTIONS = Options(map_bytes=1 << 20, slab_bytes=256 << 10)
PLACES = {1: run_of(0, 9000), 2: scattered(10, 4, 2), 3: run_of(4, 9000)}
LENGTHS = {1: 9000, 2: 30_000, 3: 9000}


def test_a_disk_of_version_1_opens_and_reads(tmp_path: Path) -> None:
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    disk = Disk(tmp_path, OPTIONS, clock=ManualClock())
    found = {record.generation: record for record in scan_all(disk, 2)}
    assert sorted(found) == [1, 2, 3]
    assert [found[i].codec for i in (1, 2, 3)] == [Codec.RAW, Codec.ZSTD, Codec.RAW]
    for number, record in found.items():
        read, target = read_one(disk, record)
        assert read.key == number.to_bytes(8, "big") * 4
        assert same_bytes(target, content(number, LENGTHS[number]))
    disk.close()


def _make() -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        for codec, numbers in ((Codec.RAW, (1, 3)), (Codec.ZSTD, (2,))):
            options = Options(map_bytes=1 << 20, slab_bytes=256 << 10, codec=codec)
            disk = Disk(path, options, clock=ManualClock())
            if not disk.segments():
                disk.grow()
            for number in numbers:
                write_one(disk, *piece(number, PLACES[number], LENGTHS[number]))
            disk.close()
        with tarfile.open(GOLDEN, "w:gz") as archive:
            archive.add(path / "index" / "data.mdb", "index/data.mdb")
            archive.add(path / "slab-00000.dat", "slab-00000.dat")


if __name__ == "__main__":
    _make()
