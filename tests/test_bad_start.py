"""Starts that cannot be as asked: refused with the setting's name and a remedy, or served without what failed, with one log line."""

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstored.cli.reach import listed
from kvstored.client import Client, Keys
from kvstored.errors import Unavailable
from kvstored.pb import kvstored_pb2 as pb
from kvstored.tiers import disk_env
from kvstored.tiers.disk import map_bytes_for
from tests.crash.blocks import content_of, spec_of
from tests.crash.served import Served, kvstored, wait_until

SIZE = 4096
QUIET = ("--listen", "off", "--metrics-listen", "off")


def refused(*arguments: str) -> str:
    """What a `serve` that ends at once says."""
    done = kvstored("serve", *arguments)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr


def check_serves(served: Served) -> None:
    served.recovered()  # until then a put finds no space
    with Client(served.address) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        key = os.urandom(32)
        assert namespace.put(Keys.opaque([key]), [content_of(key, SIZE)]).committed == 1
        assert namespace.get(Keys.opaque([key])).hits == 1


def test_a_socket_that_another_daemon_serves_is_refused_and_left_alone(tmp_path: Path) -> None:
    """A second daemon with a state directory of its own bound to it: the first ran on, ready, and nobody could reach it any more."""
    metrics = tmp_path / "m"
    with Served(tmp_path, dram="16MiB", disk="0B", metrics_listen=f"unix:{metrics}") as served:
        other = ("--state-dir", str(tmp_path / "other"), "--dram", "4MiB", "--disk", "0B")
        said = refused(*other, *QUIET, "--socket", str(served.socket))
        assert f"socket={served.socket} error=Address already in use" in said
        mine = (*other, "--socket", str(tmp_path / "o"))
        for taken in (
            ("--listen", "off", "--metrics-listen", f"unix:{metrics}"),
            ("--listen", f"unix:{metrics}", "--metrics-listen", "off"),
        ):
            assert f"={metrics} error=Address already in use" in refused(*mine, *taken)
        assert metrics.is_socket()
        check_serves(served)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[dram]\ncapcity = "1GiB"\n', "dram.capacity"),
        ("[dram]\ncapacity = 1000000000\n", "dram.capacity"),
        ('[limits]\nfill_ttl = "soon"\n', "limits.fill_ttl"),
        ('policy = "best"\n', "policy"),
        ("[dram\n", "cannot be read"),
    ],
)
def test_a_config_with_a_typo_is_refused_and_the_setting_named(
    tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "kvstored.toml"
    file.write_text(text)
    assert named in refused("--config", str(file), "--state-dir", str(tmp_path / "state"))


def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    socket = tmp_path / ("s" * 108)
    said = refused("--state-dir", str(tmp_path / "state"), "--socket", str(socket), *QUIET)
    assert "socket" in said
    assert "107" in said


def test_a_state_directory_in_use_is_refused_and_its_keeper_named(tmp_path: Path) -> None:
    with Served(tmp_path, dram="16MiB", disk="16MiB") as served:
        keeper_pid = served.stat().keeper_pid
        other = ("--socket", str(tmp_path / "other"), "--dram", "16MiB", *QUIET)
        assert str(keeper_pid) in refused("--state-dir", str(served.state_dir), *other)
        check_serves(served)


@pytest.mark.parametrize("damage", ["version", "index", "namespaces"])
def test_another_versions_state_is_a_cold_start_with_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    served = Served(tmp_path, dram="16MiB", disk="16MiB")
    if damage == "version":
        monkeypatch.setattr(disk_env, "VERSION", 99)
        index = served.state_dir / "disk" / "index"
        disk_env.RecordEnv(index, map_bytes_for(16 << 20)).close()
        monkeypatch.undo()
    else:
        with served:
            check_serves(served)
        path = "disk/index/data.mdb" if damage == "index" else "namespaces.json"
        with (served.state_dir / path).open("r+b") as file:
            file.write(b"\xff" * 8192)
    with served:
        assert ("from their copy" if damage == "namespaces" else "cold") in served.tail()
        check_serves(served)
        assert [tier.state for tier in served.stat().tiers] == ["on", "on"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 48 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small filesystem")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def filled(folder: Path, left_bytes: int = 0) -> Path:
    """A file that takes what the filesystem has left, but for so much."""
    filler = folder / "filler"
    free = os.statvfs(folder)
    try:
        filler.write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - left_bytes)))
    except OSError as error:
        if error.errno != errno.ENOSPC:  # the daemon took some of it meanwhile
            raise
    return filler


def test_a_disk_that_cannot_fit_is_refused(tmp_path: Path, small: Path) -> None:
    flags = ("--state-dir", str(small / "state"), "--disk", "128MiB")
    assert "disk.capacity" in refused(*flags, *QUIET)


def test_a_disk_without_room_for_a_slab_leaves_the_store_to_dram(
    tmp_path: Path, small: Path
) -> None:
    filled(small, left_bytes=24 << 20)  # the index takes 16 MiB of it
    settings = {"disk.path": str(small)}
    with Served(tmp_path, dram="16MiB", disk="32MiB", settings=settings) as served:
        check_serves(served)
        assert "a tier cannot grow now" in served.tail()
        assert served.stat().tiers[1].granted_bytes == 0


def test_a_full_state_directory_serves_known_and_new_namespaces(small: Path) -> None:
    """Its log goes there as well, and cannot be written. An engine must get its namespace also then; retiring one fails whole."""
    with Served(small, dram="16MiB", disk="0MiB") as served, Client(served.address) as client:
        check_serves(served)
        filler = filled(small)
        added = client.open_namespace(spec_of(2 * SIZE))
        key = os.urandom(32)
        assert added.put(Keys.opaque([key]), [content_of(key, 2 * SIZE)]).committed == 1
        assert served.stat().counters["namespace_save_failures"] >= 1
        request = pb.RetireNamespaceRequest(namespace=added.digest)
        with pytest.raises(Unavailable, match="cannot be saved"):
            client.call("RetireNamespace", request, pb.RetireNamespaceResponse)
        assert not any(each.retired for each in listed(client))
        stat = served.kill_daemon()
        served.answered(after_epoch=stat.epoch)
        check_serves(served)
        assert added.digest not in [each.digest for each in listed(client)], "it was in memory only"
        filler.unlink()
        client.open_namespace(spec_of(2 * SIZE))
        stat = served.kill_daemon()
        served.answered(after_epoch=stat.epoch)
        assert added.digest in [each.digest for each in listed(client)]


@pytest.mark.parametrize("damage", [b"\0" * 4096, b"\xff" * 16], ids=["zeros", "another kind"])
def test_an_index_with_damaged_pages_is_a_cold_start_of_the_disk(
    tmp_path: Path, damage: bytes
) -> None:
    """LMDB ended the process with an assertion, again and again; or its error was waited out, for good, and nothing was ever recovered."""
    served = Served(tmp_path, dram="16MiB", disk="16MiB")
    with served:
        check_serves(served)
        with Client(served.address) as client:
            namespace = client.open_namespace(spec_of(SIZE))
            keys = [os.urandom(32) for _ in range(200)]
            blocks = [content_of(key, SIZE) for key in keys]
            assert namespace.put(Keys.opaque(keys), blocks).stored == len(keys)
    index = served.state_dir / "disk" / "index" / "data.mdb"
    with index.open("r+b") as file:
        for page in range(2, index.stat().st_size // 4096):
            content = os.pread(file.fileno(), 4096, page * 4096)
            if any(key in content for key in keys):
                os.pwrite(file.fileno(), damage, page * 4096)
    with served:
        wait_until(lambda: "starts cold" in served.tail(), what="the disk starts cold")
        wait_until(lambda: served.try_stat() is not None, what="the daemon answers again")
        check_serves(served)
        assert [tier.state for tier in served.stat().tiers] == ["on", "on"]
        assert not (index.parent / "scanning").exists()
