"""The commands on scheduling, against a real daemon."""

import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kvstored.client import Client, GroupKind, GroupSpec, LoadQuestion, NamespaceSpec, PrefillRun
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.namespaces import spec_of
from tests.cli.conftest import Served, done, run, told

TOKENS = ("--tokens", ",".join(map(str, range(40))))
_numbers = itertools.count()


@pytest.fixture
def name(daemon: Served) -> str:
    """A namespace with ten stored blocks of four tokens."""
    made = f"scheduled{next(_numbers):03}@1"
    size = ("--block-bytes", "8KiB", "--block-tokens", "4")
    told("put", made, *TOKENS, *size, input=os.urandom(10 * 8192))
    return made


def advice(name: str, *arguments: str) -> dict[str, Any]:
    found = told("match", name, *TOKENS, "--advise", *arguments)["advice"]
    assert isinstance(found, dict)
    return found


def test_match_advises_to_load_what_is_slow_to_compute(name: str) -> None:
    slow = advice(name, "--prefill-tokens-per-s", "10")
    assert (slow["prefill_source"], slow["prefill_s"]) == ("asked", 4.0)
    assert (slow["split_blocks"], slow["split_tokens"]) == (10, 40)
    assert 0 < slow["total_load_s"] == slow["split_s"] < 4.0
    fast = advice(name, "--prefill-tokens-per-s", "1e12")
    assert (fast["split_blocks"], fast["overlap_blocks"]) == (0, 10)


def test_match_advises_what_a_deadline_leaves_time_for(name: str) -> None:
    assert advice(name, "--deadline", "10s")["deadline_blocks"] == 10
    assert advice(name)["deadline_blocks"] == 10, "no deadline is all the time that there is"


def test_match_shows_its_advice_as_a_table(name: str) -> None:
    text = done("match", name, *TOKENS, "--advise", "--deadline", "10s").stdout
    assert "by the deadline" in text
    assert "10 blocks, 40 tokens" in text
    assert "no engine told" in text


def test_advice_that_was_not_asked_for_is_refused_and_not_given(name: str) -> None:
    assert run("match", name, *TOKENS, "--deadline", "1s").exit_code == 2
    assert "advice" not in told("match", name, *TOKENS)


def test_a_client_asks_in_the_same_call_and_tells_how_fast_its_engine_is(daemon: Served) -> None:
    spec = NamespaceSpec("asked", "1", "u8", "flat", 1, 4, (GroupSpec("kv", GroupKind.LINEAR, 64),))
    with Client(f"unix://{daemon.socket}") as client:
        kv = client.open_namespace(spec)
        keys = kv.keys(range(8))
        assert kv.put(keys, [[bytes(64)], [bytes(64)]]).stored == 2
        assert kv.match(keys).advice is None
        request = kv.begin_request(keys)
        kv.complete_request(request, prefill=PrefillRun(tokens=100, seconds=0.1))
        found = kv.match(keys, ask=LoadQuestion(deadline_s=1e-9)).advice
        assert found is not None
        assert found.prefill_source == "measured"
        assert found.prefill_s == pytest.approx(8 / 1000)
        assert found.load_bytes == (0, 128, 0, 0)
        assert found.deadline_blocks == 2, "a deadline below a millisecond is one"


def test_the_days_writes_are_shown_and_outlive_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        state_dir = Path(folder) / "state"
        state_dir.mkdir(mode=0o700)
        settings = {
            "KVSTORED_DISK_WRITE_BUDGET": "1MiB",
            "KVSTORED_DISK_CODEC": "raw",
            "KVSTORED_OBJECTIVES": "decode,transfer,hit-rate,footprint",
        }
        served = Served(state_dir, **settings)
        for name, value in served.environment.items():
            monkeypatch.setenv(name, value)
        served.start()
        try:
            size = ("--block-bytes", "8KiB", "--block-tokens", "4")
            told("put", "worn@1", *TOKENS, *size, input=os.urandom(10 * 8192))
            served.stop()
            served.start()
            (nvme,) = (tier for tier in told("stat")["tiers"] if tier["name"] == "nvme")
            shown = nvme["written_day_bytes"], nvme["write_budget_bytes"], nvme["write_state"]
            assert shown == (10 * 8192, 1 << 20, "open")
            assert "nvme writes" in done("stat").stdout
            assert told("schedule")["objectives"][0] == "decode"
        finally:
            served.stop()


def test_schedule_shows_the_next_rounds(name: str) -> None:
    plan = told("schedule")
    assert plan["objectives"][0] == "hit-rate"
    assert {tier["name"] for tier in plan["tiers"]} == {"dram", "nvme"}
    text = done("schedule", "--run").stdout
    assert "nothing has to leave" in text
    assert "begun: " in text


def test_the_order_of_objectives_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORED_OBJECTIVES", "decode,transfer,footprint,hit-rate")
    assert told("config")["objectives"]["value"] == "decode,transfer,footprint,hit-rate"
    monkeypatch.setenv("KVSTORED_OBJECTIVES", "decode,transfer,footprint")
    result = run("config")
    assert (result.exit_code, result.stdout) == (78, "")
    assert "not an order of hit-rate,transfer,decode,footprint" in result.stderr


def test_selections_are_recorded_analysed_and_come_back_as_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvs") as folder:
        state_dir = Path(folder) / "state"
        state_dir.mkdir(mode=0o700)
        log, weights = Path(folder) / "selections", Path(folder) / "weights"
        served = Served(state_dir, KVSTORED_FEEDBACK_LOG=str(log))
        for key, value in served.environment.items():
            monkeypatch.setenv(key, value)
        served.start()
        try:
            size = ("--block-bytes", "8KiB", "--block-tokens", "4")
            told("put", "seen@1", *TOKENS, *size, input=os.urandom(10 * 8192))
            with Client(f"unix://{served.socket}") as client:
                kv = client.open_namespace(opened_spec(client))
                keys = kv.keys(range(40))
                steps = [[i < 3 for i in range(10)]] * 32
                report = kv.report_access(keys, steps, layer=2)
                assert (report.taken, report.blocks, report.raised) == (True, 10, 3)
                assert kv.report_resident(keys, deadline_s=0.1) == 0
            ends = time.monotonic() + 10
            while not log.exists() and time.monotonic() < ends:
                time.sleep(0.05)
            served.stop()
            (stream,) = told("selection", "stats", str(log), "--weights", str(weights))["streams"]
            assert (stream["group"], stream["layer"], stream["steps"]) == ("kv", 2, 32)
            assert stream["frequency"] == pytest.approx(0.3)
            assert "stability" in done("selection", "stats", str(log)).stdout
            served.environment["KVSTORED_FEEDBACK_WEIGHTS"] = str(weights)
            served.start()
        finally:
            served.stop()


def opened_spec(client: Client) -> NamespaceSpec:
    """Of the only namespace."""
    (found,) = client.call(
        "ListNamespaces", pb.ListNamespacesRequest(), pb.ListNamespacesResponse
    ).namespaces
    return spec_of(found.namespace, caller_tenant="default")
