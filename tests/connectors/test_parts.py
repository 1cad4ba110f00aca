"""Identity, options and versions of connectors: without a daemon."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstored.client import GroupKind, GroupSpec
from kvstored.connectors import identity, versions
from kvstored.connectors.options import ConnectorOptions
from kvstored.core.namespace import digest
from kvstored.errors import ConfigError, InvalidArgument

from .conftest import spec_with

ROOT = Path(__file__).parents[2]
COMMON = ("identity", "options", "statistics", "versions", "breaker", "queue", "guarded")
ENGINES = ("torch", "vllm", "sglang", "lmcache", "transformers")


def test_the_common_parts_import_no_engine() -> None:
    program = f"""
import sys
for name in {ENGINES}: sys.modules[name] = None
for name in {COMMON}: __import__("kvstored.connectors." + name)
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=50)


def weights(folder: Path, content: bytes, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def safetensors(tensors: dict[str, bytes]) -> bytes:
    header, at = {}, 0
    for name, content in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(content)],
            "data_offsets": [at, at + len(content)],
        }
        at += len(content)
    packed = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(packed).to_bytes(8, "little") + packed + b"".join(tensors.values())


def test_weights_are_known_by_their_bytes_not_by_their_name(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    same = [weights(tmp_path / name, content) for name in ("a", "b")]
    first, second = map(identity.weights_fingerprint, same)
    assert first == second
    assert identity.weights_fingerprint(same[0] / "model.safetensors") == first
    assert identity.weights_fingerprint(weights(tmp_path / "c", content + b"\0")) != first
    assert identity.weights_fingerprint(tmp_path) == ""


def test_one_changed_tensor_makes_another_model(tmp_path: Path) -> None:
    """Samples at fixed distances missed a layer whose attention was scaled, and its KV was taken for the original's."""
    tensors = {f"layer.{i}": bytes([i]) * 70_000 for i in range(40)}
    first = identity.weights_fingerprint(weights(tmp_path / "a", safetensors(tensors)))
    for name, content in tensors.items():
        changed = {**tensors, name: bytes([content[0] ^ 1]) * len(content)}
        other = weights(tmp_path / "b", safetensors(changed))
        assert identity.weights_fingerprint(other) != first, name


def test_files_of_the_hub_s_cache_are_known_by_their_content_s_hash(tmp_path: Path) -> None:
    found = []
    for i, blob in enumerate(("ab" * 32, "cd" * 32, "ab" * 32)):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / blob).write_bytes(bytes(i))
        (folder / "model.safetensors").symlink_to(folder / blob)
        found.append(identity.weights_fingerprint(folder))
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, (5).to_bytes(8, "little") + b"[1,2]x", b"\2" + bytes(7) + b"{}"]
)
def test_what_is_no_safetensors_file_is_still_told_apart(tmp_path: Path, content: bytes) -> None:
    first = identity.weights_fingerprint(weights(tmp_path / "a", content))
    assert first != identity.weights_fingerprint(weights(tmp_path / "b", content + b"x"))


def test_small_weights_are_hashed_whole(tmp_path: Path) -> None:
    found = {
        identity.weights_fingerprint(weights(tmp_path / "s", bytes(i) + b"\1" + bytes(99 - i)))
        for i in range(100)
    }
    assert len(found) == 100


def test_whatever_changes_what_a_model_computes_is_another_revision() -> None:
    base = identity.revision_of("w", {"rope": {"theta": 1e4}, "quantization": None})
    assert base == identity.revision_of("w", {"quantization": None, "rope": {"theta": 1e4}})
    assert base != identity.revision_of("v", {"rope": {"theta": 1e4}, "quantization": None})
    assert base != identity.revision_of("w", {"rope": {"theta": 1e6}, "quantization": None})


def test_names_are_made_to_fit_and_stay_apart() -> None:
    long = [spec_with(model="m" * 300 + end) for end in ("a", "b")]
    assert digest(long[0]) != digest(long[1])
    assert len(long[0].model.encode()) <= 256
    assert spec_with(model="org/name@main").model == "org/name-main"
    assert spec_with(model="a\nb").model != spec_with(model="a\tb").model
    with pytest.raises(InvalidArgument):
        spec_with(groups=[GroupSpec("kv", GroupKind.LINEAR, 0)])


def test_extra_keys_never_read_as_each_other() -> None:
    assert identity.extra_keys() == ()
    made = [
        identity.extra_keys(salt="x"),
        identity.extra_keys(lora="x"),
        identity.extra_keys(multimodal=["x"]),
        identity.extra_keys(multimodal=["x", "x"]),
        identity.extra_keys(salt=""),
        identity.extra_keys(salt="x" * 5000),
        identity.extra_keys(salt="x" * 5001),
    ]
    assert len(set(made)) == len(made)
    assert all(len(key) <= 4096 for keys in made for key in keys)


def test_the_instruction_set_is_read_from_the_processor_s_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for flags, isa in (
        ("sse avx2 avx512f amx_tile", "amx"),
        ("sse avx2 avx512f", "avx512"),
        ("sse avx2", "avx2"),
        ("fp asimd", "neon"),
        ("sse", "generic"),
    ):
        cpuinfo.write_text(f"processor : 0\nflags\t: {flags}\n")
        assert identity.cpu_isa(cpuinfo) == isa
    assert identity.cpu_isa(tmp_path / "absent") == "unknown"


def test_options_are_read_with_units_and_wrong_ones_are_refused_by_name() -> None:
    assert ConnectorOptions.parsed({}) == ConnectorOptions()
    given = {"address": "unix:///s", "lookup": "50ms", "queue": "1GiB", "verify": False}
    parsed = ConnectorOptions.parsed(given)
    assert (parsed.address, parsed.lookup_s, parsed.queue_bytes, parsed.verify) == (
        "unix:///s",
        0.05,
        1 << 30,
        False,
    )
    for wrong in (
        {"adress": "x"},
        {"lookup": 5},
        {"lookup": "5"},
        {"lookup": "0s"},
        {"queue": "1 lot"},
        {"verify": "yes"},
        {"model": 3},
    ):
        with pytest.raises(ConfigError, match="connector"):
            ConnectorOptions.parsed(wrong)


def test_an_old_engine_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, is_older, is_newer in (
        ("0.31.9", True, False),
        ("0.32.0", False, False),
        ("0.32.0.post1+cpu", False, False),
        ("0.33.5rc1", False, False),
        ("0.34.0", False, True),
        ("1.0", False, True),
    ):
        assert versions.is_older(version, versions.VLLM) == is_older, version
        assert versions.is_newer(version, versions.VLLM) == is_newer, version
    monkeypatch.setattr(versions.metadata, "version", lambda _: "0.24.0")
    with pytest.raises(ConfigError, match=r"vLLM 0\.24\.0 is too old.*needs 0\.32 or newer"):
        versions.check(versions.VLLM)
    assert versions.minor("0.33.1.post2") == "0.33"


def test_an_engine_that_is_not_there_is_named() -> None:
    absent = versions.Supported("Nothing", ("no-such-engine",), "1.0", "1.0")
    assert versions.installed(absent) is None
    with pytest.raises(ConfigError, match="no-such-engine"):
        versions.check(absent)
