import asyncio
import http.client
import time
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstored.errors import ConfigError
from kvstored.fields import Endpoint
from kvstored.metrics import FACTS, Build, Metrics, Sets
from kvstored.metrics_server import MetricsServer


def _metrics() -> Metrics:
    sets = Sets(
        methods=("Match", "Commit"), errors=("NoSpace", "internal"), queues=("disk:demand",)
    )
    return Metrics(sets, Build(version="1", policy="lru", codec="raw"))


def _samples(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.exposition().decode())
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in families
        for sample in family.samples
    }


def test_what_is_measured_is_exported() -> None:
    metrics = _metrics()
    metrics.request_seconds["Match"].observe(0.001)
    metrics.request_errors["NoSpace"].inc()
    metrics.queue_depth_jobs["disk:demand"].set(3)
    metrics.tiers[1].used_bytes.set(4096)
    samples = _samples(metrics)
    assert samples["kvstored_request_seconds_count['Match']"] == 1
    assert samples["kvstored_request_errors_total['NoSpace']"] == 1
    assert samples["kvstored_queue_depth_jobs['disk:demand']"] == 3
    assert samples["kvstored_tier_used_bytes['dram']"] == 4096
    assert samples["kvstored_build_info['1', 'lru', 'raw']"] == 1


def test_facts_are_counters_with_their_labels() -> None:
    metrics = _metrics()
    totals = {
        ("put_bytes", ""): 7.0,
        ("forgotten_copies", "dram:evicted-demand"): 2.0,
        ("hit_tokens", "nvme"): 256.0,
        ("no such fact", "x"): 1.0,
    }
    metrics.set_facts(totals)
    samples = _samples(metrics)
    assert samples["kvstored_put_bytes_total[]"] == 7
    assert samples["kvstored_forgotten_copies_total['dram', 'evicted-demand']"] == 2
    assert samples["kvstored_hit_tokens_total['nvme']"] == 256
    assert samples["kvstored_prefill_saved_flops_total[]"] == 0
    assert not any("such" in name for name in samples)


def test_every_name_is_in_the_project_and_ends_in_a_unit_or_a_noun() -> None:
    names = [fact.metric for fact in FACTS.values()]
    assert len(set(names)) == len(names)
    families = text_string_to_metric_families(_metrics().exposition().decode())
    foreign = [f.name for f in families if not f.name.startswith(("kvstored_", "process_"))]
    assert foreign == []


def _with_server(test: Callable[[int], Awaitable[None]], unready: str | None = None) -> None:
    async def run() -> None:
        metrics = _metrics()
        server = MetricsServer(
            metrics, refresh=lambda: metrics.leases.set(5), unready=lambda: unready
        )
        await server.start(Endpoint("127.0.0.1", 0))
        try:
            await test(server.port)
        finally:
            await server.close()

    asyncio.run(run())


async def _get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    def fetch() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    return await asyncio.get_running_loop().run_in_executor(None, fetch)


def test_metrics_health_and_readiness_are_served() -> None:
    async def test(port: int) -> None:
        status, text = await _get(port, "/metrics")
        assert status == 200
        assert "kvstored_leases 5.0" in text
        assert await _get(port, "/healthz") == (200, "ok\n")
        assert await _get(port, "/readyz?x=1") == (200, "ready\n")
        assert (await _get(port, "/other"))[0] == 404
        assert (await _get(port, "/metrics", "POST"))[0] == 405
        assert await _get(port, "/healthz", "HEAD") == (200, "")

    _with_server(test)


def test_what_is_not_ready_says_why() -> None:
    async def test(port: int) -> None:
        assert await _get(port, "/readyz") == (503, "recovering dram\n")
        assert (await _get(port, "/healthz"))[0] == 200

    _with_server(test, unready="recovering dram")


@pytest.mark.parametrize("garbage", [b"\x00\xff\r\n\r\n", b"x" * 40_000, b"GET"])
def test_garbage_gets_no_metrics_and_harms_nothing(garbage: bytes) -> None:
    async def test(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        try:
            answer = await reader.read()
        except ConnectionError:
            answer = b""
        assert b"200 OK" not in answer
        writer.close()
        assert (await _get(port, "/healthz"))[0] == 200

    _with_server(test)


def test_a_taken_address_is_refused_by_name() -> None:
    async def test(port: int) -> None:
        metrics = _metrics()
        second = MetricsServer(metrics, refresh=lambda: None, unready=lambda: None)
        with pytest.raises(
            ConfigError, match=f"metrics_listen=127.0.0.1:{port} error=Address.*--metrics-listen"
        ):
            await second.start(Endpoint("127.0.0.1", port))
        await second.close()

    _with_server(test)


def test_a_scrape_takes_milliseconds() -> None:
    metrics = _metrics()
    begun_s = time.perf_counter()
    metrics.exposition()
    assert time.perf_counter() - begun_s < 1
