from pathlib import Path

import pytest

from kvstored import config, sizing
from kvstored.errors import ConfigError
from kvstored.machine import DiskSpace, MemoryLimit


def load(
    flags: dict[str, str | None] | None = None, toml: str = "", **environ: str
) -> config.Loaded:
    file = Path(environ.pop("file")) if "file" in environ else None
    if file is not None:
        file.write_text(toml)
    return config.load(flags=flags, file=file, environ={"HOME": "/home/someone", **environ})


def test_an_empty_environment_gives_one_gib_of_dram_four_of_disk_and_loopback_ports() -> None:
    loaded = load()
    assert loaded.config.dram.capacity_bytes == 2**30
    assert loaded.config.disk.capacity_bytes == 4 * 2**30
    assert str(loaded.config.listen) == "127.0.0.1:7439"
    assert str(loaded.config.metrics_listen) == "127.0.0.1:7440"
    assert loaded.config.state_dir == Path("/home/someone/.local/state/kvstored")
    assert loaded.config.socket == loaded.config.state_dir / "kvstored.sock"
    assert loaded.config.disk.path == loaded.config.state_dir / "disk"
    assert all(setting.origin == "default" for setting in loaded.settings())


def test_xdg_variables_place_state_and_socket_and_relative_ones_are_ignored() -> None:
    loaded = load(XDG_STATE_HOME="/state", XDG_RUNTIME_DIR="/run/user/7")
    assert loaded.config.state_dir == Path("/state/kvstored")
    assert loaded.config.socket == Path("/run/user/7/kvstored/kvstored.sock")
    ignored = load(XDG_STATE_HOME="state", XDG_RUNTIME_DIR="run")
    assert ignored.config.socket == Path("/home/someone/.local/state/kvstored/kvstored.sock")


def test_a_flag_beats_the_environment_beats_the_file_and_each_origin_is_kept(
    tmp_path: Path,
) -> None:
    file = tmp_path / "kvstored.toml"
    toml = 'policy = "composite"\n[dram]\ncapacity = "2GiB"\nhigh = 0.9\nlow = 0.8\n'
    loaded = load(
        {"dram.capacity": "4GiB", "socket": None},
        toml,
        file=str(file),
        KVSTORED_DRAM_CAPACITY="3GiB",
        KVSTORED_DRAM_HIGH="0.97",
    )
    assert loaded.config.dram.capacity_bytes == 4 * 2**30
    assert loaded.config.dram.high == 0.97
    origins = {setting.key: setting.origin for setting in loaded.settings()}
    assert origins["dram.capacity"] == "flag"
    assert origins["dram.high"] == "environment KVSTORED_DRAM_HIGH"
    assert origins["dram.low"] == f"file {file}"
    assert origins["policy"] == f"file {file}"
    assert origins["socket"] == "default"


def test_the_file_is_found_by_variable_and_in_the_xdg_directory(tmp_path: Path) -> None:
    file = tmp_path / "kvstored" / "kvstored.toml"
    file.parent.mkdir()
    file.write_text('policy = "composite"')
    assert load(XDG_CONFIG_HOME=str(tmp_path)).config.policy == "composite"
    assert load(KVSTORED_CONFIG=str(file)).config.policy == "composite"
    with pytest.raises(ConfigError, match="cannot be read.*nowhere"):
        load(KVSTORED_CONFIG=str(tmp_path / "nowhere.toml"))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('dram_capacity = "1GiB"', "name=dram_capacity.*did you mean dram.capacity"),
        ('[dram]\ncapacity = "1KiB"', "dram.capacity: .*1048576: value=1024; from=file"),
        ('[bulk_tls]\nkey = "/k"', "^setting bulk_tls.key: it needs bulk_tls.certificate"),
        ('[dram]\ncapcity = "1GiB"', "name=dram.capcity.*did you mean dram.capacity"),
        ('[drum]\ncapacity = "1GiB"', "name=drum.capacity.*did you mean dram.capacity"),
        ('dram = "1GiB"', "name=dram .*did you mean"),
        ("[dram]\ncapacity = 1024", "dram.capacity.*without a unit.*64GiB"),
        ('[dram]\ncapacity = "1024"', "dram.capacity.*without a unit.*64GiB"),
        ('[dram]\ncapacity = "0"', "dram.capacity.*greater than or equal.*default=1GiB"),
        ("[dram]\nhigh = 0.5", "dram.*low must be above 0 and not above high"),
        ("[limits]\nfill_ttl = 5", "limits.fill_ttl.*without a unit.*30s"),
        ('[limits]\nlease_ttl = "2h"', "limits.lease_ttl"),
        ("socket_mode = 660", 'socket_mode.*"0660"'),
        ('policy = "lifo"', "policy.*'lru'"),
        ('listen = "7439"', "listen.*127.0.0.1:7439"),
        ('listen = "0.0.0.0:7439"', "listen.*needs TLS"),
        ("policy = ", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_by_key_with_a_remedy(
    tmp_path: Path, toml: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(toml=toml, file=str(tmp_path / "kvstored.toml"))


def test_a_bad_environment_variable_names_itself() -> None:
    with pytest.raises(ConfigError, match="dram.capacity.*from=environment KVSTORED_DRAM_CAPACITY"):
        load(KVSTORED_DRAM_CAPACITY="64")
    with pytest.raises(ConfigError, match="did you mean KVSTORED_DRAM_CAPACITY"):
        load(KVSTORED_DRAM_CAPCITY="64GiB")


def test_variables_that_kubernetes_sets_for_a_service_of_this_name_are_no_settings() -> None:
    load(
        KVSTORED_SERVICE_HOST="10.0.0.1",
        KVSTORED_PORT="tcp://10.0.0.1:7439",
        KVSTORED_PORT_7439_TCP_ADDR="10.0.0.1",
    )


def test_a_socket_path_above_107_bytes_is_refused_with_its_length() -> None:
    with pytest.raises(ConfigError, match="bytes=108 max=107"):
        load({"socket": "/" + "x" * 107})
    assert load({"socket": "/" + "x" * 106}).config.socket.name == "x" * 106


def test_listening_can_be_off_or_on_a_unix_socket() -> None:
    loaded = load({"listen": "off", "metrics_listen": "unix:/run/m.sock"}).config
    assert loaded.listen is None
    assert str(loaded.metrics_listen) == "unix:/run/m.sock"
    assert str(load({"listen": "[::1]:7439"}).config.listen) == "[::1]:7439"
    assert str(load({"metrics_listen": "0.0.0.0:7440"}).config.metrics_listen) == "0.0.0.0:7440"


def test_a_configuration_survives_the_way_to_the_daemon() -> None:
    flags = {"dram.segment": "3MiB", "listen": "off", "socket_mode": "0660", "disk.capacity": "0"}
    loaded = load({**flags, "limits.fill_ttl": "250ms"}).config
    assert config.parse(loaded.to_json()) == loaded


def test_every_setting_has_one_sentence_and_a_default() -> None:
    for setting in load().settings():
        assert setting.meaning, setting
        assert setting.default, setting


@pytest.mark.parametrize(
    ("capacity", "segment"),
    [
        ("8MiB", "8MiB"),
        ("1GiB", "64MiB"),
        ("16GiB", "256MiB"),
        ("1TiB", "1GiB"),
    ],
)
def test_segments_are_a_64th_of_the_arena_within_bounds(capacity: str, segment: str) -> None:
    loaded = load({"dram.capacity": capacity})
    explicit = load({"dram.capacity": capacity, "dram.segment": segment})
    sizes = [each.config.dram.segment_effective_bytes for each in (loaded, explicit)]
    assert sizes[0] == sizes[1]


def _machine(monkeypatch: pytest.MonkeyPatch, *, memory: MemoryLimit, disk: DiskSpace) -> None:
    monkeypatch.setattr("kvstored.machine.memory_limit", lambda: memory)
    monkeypatch.setattr("kvstored.machine.disk_space", lambda path: disk)


ROOMY_MEMORY = MemoryLimit(64 * 2**30, 60 * 2**30, "machine")
ROOMY_DISK = DiskSpace(2**40, 2**39, "/")


def test_sizes_that_fit_raise_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    _machine(monkeypatch, memory=ROOMY_MEMORY, disk=ROOMY_DISK)
    assert sizing.check_sizes(load().config) == []


def test_dram_above_the_memory_limit_is_refused_with_the_largest_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = MemoryLimit(2**30, 2**30, "cgroup /sys/fs/cgroup/memory.max")
    _machine(monkeypatch, memory=limit, disk=ROOMY_DISK)
    with pytest.raises(ConfigError, match=r"limit=1.0 GiB of=cgroup .*at most 896MiB"):
        sizing.check_sizes(load().config)
    assert sizing.check_sizes(load({"dram.capacity": "896MiB"}).config) == []


def test_disk_above_the_filesystem_is_refused_and_above_its_free_space_warned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _machine(monkeypatch, memory=ROOMY_MEMORY, disk=DiskSpace(8 * 2**30, 2**30, "/small"))
    with pytest.raises(ConfigError, match=r"total=8.0 GiB path=/small"):
        sizing.check_sizes(load({"disk.capacity": "9GiB"}).config)
    (warning,) = sizing.check_sizes(load().config)
    assert "disk.capacity=4GiB" in warning
    assert sizing.check_sizes(load({"disk.capacity": "0"}).config) == []
