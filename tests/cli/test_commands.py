"""The commands on blocks and those that look inside, against a real daemon."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import ROOT, Served, done, run, told

BLOCK = 8192


_numbers = itertools.count()


@pytest.fixture
def name(daemon: Served) -> str:
    """A namespace of the test's own, by the name it will have."""
    return f"model{next(_numbers):03}@1"


@pytest.fixture
def stored(name: str, tmp_path: Path) -> bytes:
    """Tokens 1 to 10 in blocks of 4: two full blocks and half a one."""
    content = os.urandom(BLOCK * 2 + BLOCK // 2)
    outcome = put(name, content)
    assert (outcome["blocks"], outcome["committed"]) == (3, 3)
    return content


TOKENS = ("--tokens", "1,2,3,4,5,6,7,8,9,10")


def put(name: str, content: bytes, *arguments: str) -> dict[str, Any]:
    size = ("--block-bytes", "8KiB", "--block-tokens", "4")
    return told("put", name, *(arguments or TOKENS), *size, input=content)


def keys(name: str) -> list[str]:
    return list(told("match", name, *TOKENS)["keys"])


def test_put_from_stdin_then_match_and_get_to_a_file(
    name: str, stored: bytes, tmp_path: Path
) -> None:
    match = told("match", name, "--tokens", "1,2,3,4,5,6,7,8,9,10,11,12,13")
    assert match["hit_blocks"] == 2
    assert match["miss_reason"] == "never-stored"
    match = told("match", name, *TOKENS)
    assert (match["hit_blocks"], match["hit_tokens"], match["replay_tokens"]) == (3, 10, 0)
    assert match["tier_blocks"]["dram"] == 3
    out = tmp_path / "out"
    got = told("get", name, *TOKENS, "--out", str(out))
    assert (got["read_blocks"], got["bytes"]) == (3, len(stored))
    assert out.read_bytes() == stored


def test_get_writes_bytes_alone_to_stdout(name: str, stored: bytes) -> None:
    assert done("get", name, *TOKENS).stdout_bytes == stored


def test_a_second_put_finds_the_blocks_present(name: str, stored: bytes) -> None:
    outcome = put(name, stored)
    assert (outcome["present"], outcome["committed"]) == (3, 0)


def test_output_to_a_directory_or_a_full_device_is_one_line(name: str, stored: bytes) -> None:
    result = run("get", name, *TOKENS, "--out", ".")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "output is a directory" in result.stderr
    result = run("get", name, *TOKENS, "--out", "/dev/full")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "No space left" in result.stderr
    assert Path("/dev/full").is_char_device(), "not replaced by a file"


@pytest.mark.parametrize("command", ["get", "tree", "--help"])
def test_a_stdout_that_takes_nothing_is_one_line(name: str, stored: bytes, command: str) -> None:
    arguments = {"get": ["get", name, *TOKENS], "tree": ["tree"]}.get(command, [command])
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "kvstored", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1), ended.stderr
    assert "No space left" in ended.stderr


def test_token_ids_come_from_a_file_or_stdin(name: str, stored: bytes, tmp_path: Path) -> None:
    words, array = tmp_path / "words", tmp_path / "array"
    words.write_text("1 2 3 4\n5 6 7 8\n9 10\n")
    array.write_text(json.dumps([*range(1, 11)]))
    for ids in (f"@{words}", f"@{array}"):
        assert told("match", name, "--tokens", ids)["hit_blocks"] == 3
    assert told("match", name, "--tokens", "@-", input="1,2,3,4")["hit_blocks"] == 1


@pytest.mark.parametrize("ids", ["1,x", "[1, 2.5]", "@/no/such/file", "{}", "-1", "4294967296"])
def test_what_is_no_token_ids_is_refused(name: str, stored: bytes, ids: str) -> None:
    result = run("match", name, f"--tokens={ids}")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_keys_in_hexadecimal_name_the_same_blocks(name: str, stored: bytes, tmp_path: Path) -> None:
    assert told("match", name, *keys(name)[:2])["hit_blocks"] == 2
    assert done("get", name, *keys(name)[:2]).stdout_bytes == stored[: BLOCK * 2]
    own = "00112233445566778899aabbccddeeff"
    assert put(name, bytes(BLOCK), own)["committed"] == 1
    assert done("get", name, own).stdout_bytes == bytes(BLOCK)


def test_extra_keys_make_other_blocks_of_the_same_tokens(name: str, stored: bytes) -> None:
    assert told("match", name, *TOKENS, "--extra-key", "lora-7")["hit_blocks"] == 0
    assert put(name, stored, *TOKENS, "--extra-key", "lora-7")["committed"] == 3
    assert told("match", name, *TOKENS, "--extra-key", "lora-7")["hit_blocks"] == 3


@pytest.mark.parametrize("size", [0, BLOCK, BLOCK * 2 + BLOCK // 2 + 1, BLOCK * 3])
@pytest.mark.parametrize("kind", ["file", "stdin"])
def test_input_of_another_length_than_the_blocks_is_refused_and_nothing_stored(
    name: str, size: int, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "in"
    path.write_bytes(bytes(size))
    source = ("--in", str(path)) if kind == "file" else ()
    flags = ("--block-bytes", "8KiB", "--block-tokens", "4", *source)
    result = run("put", name, *TOKENS, *flags, input=bytes(size))
    assert result.exit_code == 2
    assert "blocks_bytes=20480" in result.stderr
    assert told("match", name, *TOKENS)["hit_blocks"] == 0


def test_a_get_of_what_is_not_there_leaves_the_file_as_it_was(
    name: str, stored: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.write_bytes(b"before")
    tokens = ("--tokens", "1,2,3,4,5,6,7,8,100,101,102,103")
    result = run("get", name, *tokens, "--out", str(out))
    assert result.exit_code == 66
    assert "blocks_before_it=2" in result.stderr
    assert out.read_bytes() == b"before"
    assert told("get", name, *tokens, "--prefix", "--out", str(out))["read_blocks"] == 2
    assert out.read_bytes() == stored[: BLOCK * 2]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_namespace_is_named_by_alias_model_or_digest(name: str, stored: bytes) -> None:
    known = {each["alias"]: each for each in told("namespaces")["namespaces"]}
    digest = known[name]["digest"]
    assert known[name]["blocks"] == 3
    for text in (name.removesuffix("@1"), digest, digest[:12].upper()):
        assert told("match", text, *TOKENS)["hit_blocks"] == 3


def test_an_unknown_namespace_is_not_found_and_the_nearest_is_named(
    name: str, stored: bytes
) -> None:
    result = run("match", name.replace("@1", "@2"), *TOKENS)
    assert result.exit_code == 66
    assert f"did you mean {name}?" in result.stderr


def test_a_name_that_means_something_else_is_refused_with_the_difference(
    name: str, stored: bytes
) -> None:
    result = run("put", name, *TOKENS, "--block-bytes", "4KiB", "--block-tokens", "4", input=b"")
    assert result.exit_code == 2
    assert "bytes_per_block" in result.stderr


def test_remove_and_clear_forget_and_say_how_many(name: str, stored: bytes) -> None:
    assert told("remove", name, keys(name)[2])["blocks"] == 1
    assert told("match", name, *TOKENS)["hit_blocks"] == 2
    refused = run("clear", name, input="n\n")
    assert refused.exit_code == 1
    assert told("match", name, *TOKENS)["hit_blocks"] == 2
    assert told("clear", name, "--yes")["blocks"] == 2
    assert told("match", name, *TOKENS)["hit_blocks"] == 0


def test_a_pin_is_listed_until_it_is_unpinned(name: str, stored: bytes) -> None:
    pinned = told("pin", name, *TOKENS, "--ttl", "2min")
    assert pinned["blocks"] == 3
    held = {each["id"]: each for each in told("leases")["leases"]}
    assert held[pinned["pin"]]["kind"] == "pin"
    assert 100 < held[pinned["pin"]]["expires_in_s"] <= 120
    assert pinned["pin"] in done("leases").stdout
    assert told("unpin", pinned["pin"])["found"]
    assert run("unpin", pinned["pin"]).exit_code == 66


MORE = ("--tokens", "1,2,3,4,5,6,7,8,9,10,11,12")
"""The first two blocks of TOKENS, and one that is not stored."""


def test_a_pin_tells_how_many_of_the_blocks_it_holds(name: str, stored: bytes) -> None:
    pinned = told("pin", name, *MORE)
    assert (pinned["keys"], pinned["blocks"]) == (3, 2)
    assert "2 of 3" in done("pin", name, *MORE).stdout


def test_a_pin_of_nothing_is_not_found_and_makes_no_pin(name: str, stored: bytes) -> None:
    before = told("stat")["pins"]
    result = run("pin", name, "--tokens", "9,9,9,9")
    assert (result.exit_code, result.stdout) == (66, "")
    assert "nothing is pinned" in result.stderr
    assert told("stat")["pins"] == before


def test_what_is_no_pin_is_refused_with_what_one_is(daemon: Served) -> None:
    result = run("unpin", "abc")
    assert result.exit_code == 2
    assert "'abc' is no pin; a pin is the number that kvstored pin printed" in result.stderr


def test_prefetch_waits_for_its_job(name: str, stored: bytes) -> None:
    assert told("prefetch", name, *TOKENS, "--wait")["state"] == "done"


def test_prefetch_tells_what_is_there_already_from_what_is_absent(name: str, stored: bytes) -> None:
    told_ = told("prefetch", name, *MORE, "--wait")
    assert (told_["keys"], told_["already_there"], told_["absent"], told_["blocks"]) == (3, 2, 1, 0)


def test_put_supersedes_a_name_only_when_told_to(name: str, stored: bytes) -> None:
    other = ("put", name, "--tokens", "1,2,3,4", "--block-bytes", "4KiB", "--block-tokens", "4")
    assert run(*other, input=bytes(4096)).exit_code == 2
    assert told(*other, "--supersede", input=bytes(4096))["committed"] == 1
    states = [each["retired"] for each in told("namespaces")["namespaces"] if each["alias"] == name]
    assert sorted(states) == [False, True]


def test_stat_names_processes_and_tiers(daemon: Served, name: str, stored: bytes) -> None:
    stat = told("stat")
    assert daemon.process is not None
    assert stat["keeper_pid"] == daemon.process.pid
    assert stat["daemon_pid"] > 0
    assert [tier["name"] for tier in stat["tiers"]] == ["dram", "nvme"]
    assert stat["blocks"] >= 3
    assert isinstance(stat["counters"], dict)
    text = done("stat").stdout
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert "-" not in rows["dram"]
    assert "-" in rows["nvme"], "nothing is slower, so nothing is dirty"
    assert "e+0" not in text, "counters are whole numbers"
    assert "16.0 MiB" in text


def test_tree_draws_the_runs_of_a_namespace(name: str, stored: bytes) -> None:
    tree = told("tree", name)
    assert sum(node["blocks"] for node in tree["nodes"]) == 3
    text = done("tree", name).stdout
    assert name in text
    assert "fingerprint" in text
    assert "depth 0: 3 blocks, 10 tokens" in text
    told("remove", name, *keys(name)[1:])
    assert "1 block, 4 tokens" in done("tree", name).stdout


def test_locate_and_explain_tell_where_a_block_is_and_why_not(name: str, stored: bytes) -> None:
    where = told("locate", name, *TOKENS)["keys"]
    assert all("dram" in each["tiers"] for each in where)
    told("remove", name, keys(name)[2])
    assert told("locate", name, keys(name)[2])["keys"][0]["readable"] is False
    verdicts = [each["verdict"] for each in told("explain", name, *TOKENS, "--json")["keys"]]
    assert verdicts == ["stored", "stored", "removed"]
    assert "removed" in done("explain", name, *TOKENS).stdout


def test_events_go_on_where_an_earlier_call_ended(name: str) -> None:
    before = told("events")
    since = f"{before['epoch']}:{before['cursor']}"
    digest = put(name, bytes(BLOCK * 2 + BLOCK // 2))["namespace"]
    after = told("events", "--since", since)
    assert not after["lost"]
    # other tests' blocks may just be written to disk
    mine = [event for event in after["events"] if event["namespace"] == digest]
    kinds = [event["kind"] for event in mine]
    assert kinds[0] == "namespace_opened"
    assert kinds.count("stored") >= 3
    assert {event["key"] for event in mine if event["key"]} == set(keys(name))
    assert told("events", "--since", "1:1")["lost"]


def test_verify_reads_every_piece(name: str, stored: bytes) -> None:
    checked = told("verify", name)
    assert (checked["corrupt"], checked["bytes"] >= len(stored)) == (0, True)
    assert told("verify")["pieces"] >= checked["pieces"]


def test_verify_drops_what_is_corrupt_on_disk_and_fails(
    daemon: Served, name: str, stored: bytes
) -> None:
    slab = daemon.state_dir / "disk" / "slab-00000.dat"
    head = stored[:BLOCK]
    ends = time.monotonic() + 20
    # written back: the bytes are in the slab before their record is committed
    while (at := slab.read_bytes().find(head)) < 0 or told("stat")["tiers"][0]["dirty_copies"]:
        assert time.monotonic() < ends
        time.sleep(0.05)
    with slab.open("r+b") as file:
        file.seek(at)
        file.write(bytes([head[0] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    result = run("verify", name, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["corrupt"] == 1
    assert told("verify", name)["corrupt"] == 0, "it was dropped"
    assert done("get", name, *TOKENS).stdout_bytes == stored, "DRAM still has it"


def test_retired_and_removed_namespaces(name: str, stored: bytes) -> None:
    told("retire", name)
    known = {each["alias"]: each["retired"] for each in told("namespaces")["namespaces"]}
    assert known[name] is True
    assert told("match", name, *TOKENS)["hit_blocks"] == 3, "retired is still readable"
    known = {each["alias"]: each["retired"] for each in told("namespaces")["namespaces"]}
    assert known[name] is True, "a look does not bring it back into use"
    assert told("remove-namespace", name, "--yes")["blocks"] == 3
    assert run("match", name, *TOKENS).exit_code == 66


def test_events_follow_prints_one_object_a_line(name: str, daemon: Served) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstored", "events", "--follow", "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stdout is not None
        try:
            digest = put(name, bytes(BLOCK * 2 + BLOCK // 2))["namespace"]
            kinds = []
            for line in following.stdout:
                event = json.loads(line)
                if event["namespace"] == digest:
                    kinds.append(event["kind"])
                if kinds.count("stored") == 3:
                    break
            assert kinds[0] == "namespace_opened"
        finally:
            following.kill()


def is_back(epoch: int) -> bool:
    """A daemon of another boot answers, and its scans are done: until then a put finds no space."""
    if run("stat").exit_code:
        return False
    stat = told("stat")
    return bool(stat["epoch"] != epoch and not stat["recovering"])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell's background job ignores interrupts, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_events_follow_over_a_restart_and_end_with_the_cursor(name: str, daemon: Served) -> None:
    """It ended with the daemon's process."""
    kept = told("events")  # what is there already would fill the pipe
    since = f"{kept['epoch']}:{kept['cursor']}"
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "kvstored", "events", "--follow", "--json", "--since", since],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stdout is not None
        try:
            put(name, bytes(BLOCK * 2 + BLOCK // 2))
            assert json.loads(following.stdout.readline())["epoch"] > 0
            before = told("stat")
            ends = time.monotonic() + 20
            os.kill(before["keeper_pid"], signal.SIGSTOP)
            os.kill(before["daemon_pid"], signal.SIGKILL)
            try:
                assert following.stderr is not None
                assert "the daemon is away" in following.stderr.readline()
            finally:
                os.kill(before["keeper_pid"], signal.SIGCONT)
            while not is_back(before["epoch"]):
                assert time.monotonic() < ends
                time.sleep(0.05)
            told("clear", name, "--yes")
            put(name, bytes(BLOCK * 2 + BLOCK // 2))
            while json.loads(following.stdout.readline())["epoch"] == before["epoch"]:
                assert time.monotonic() < ends
            following.send_signal(signal.SIGINT)
            _, errors = following.communicate(timeout=20)
            epoch = told("stat")["epoch"]
            assert errors.splitlines()[-1].startswith(f"--since {epoch}:")
            assert following.returncode == 0
        finally:
            following.kill()
