"""The gRPC front: a process of its own that turns gRPC calls into calls of the local channel.

Unary calls pass through as bytes, unparsed, with their deadline; typed errors come back in the trailing metadata. Decoding and
copying megabytes happens here, never in the daemon.
"""

import asyncio
import ipaddress
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health
from grpc_reflection.v1alpha import reflection

from kvstored import logs
from kvstored.client.framing import Framing
from kvstored.client.nearby import host_id
from kvstored.client.segments import Segments
from kvstored.clock import SystemClock
from kvstored.config import Config
from kvstored.errors import ConfigError, KvstoredError, Unavailable
from kvstored.notify import Notifier
from kvstored.pb import kvstored_pb2 as pb
from kvstored.transport.bulk import BulkServer, Certificate
from kvstored.transport.front_streams import Streams
from kvstored.transport.sockets import path_of, refuse_served
from kvstored.transport.upstream import Upstream
from kvstored.wire.bulk import FRAMES_VERSION
from kvstored.wire.frames import DEADLINE_S_MAX, PAYLOAD_BYTES_MAX
from kvstored.wire.methods import (
    ACQUIRE_STORED,
    GPU_POOL,
    KEEP_ALIVE,
    METHODS,
    PROJECTION,
    REPORT_BULK,
    SEGMENT,
    SERVICE,
    WAIT_LAYERS,
    Method,
)
from kvstored.wire.status import ERROR_DETAIL_KEY, failure_of, status_of

log = logs.get("front")

Context = Any  # grpc.aio.ServicerContext: grpc ships no types
Unary = Callable[[bytes, Context], Awaitable[bytes]]

_PROBE_S = 1.0
_RPCS_MAX = 1024


def run(config: Config) -> int:
    """The front process: serves until SIGTERM. The exit code."""
    if config.listen is None:
        raise ConfigError("the gRPC front has nowhere to listen: set `listen`, say 127.0.0.1:7439")
    if config.listen.path:
        Path(config.listen.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    segments = Segments()
    frames = frames_of(config)
    bulk = bulk_server(config, segments, frames.framing)
    asyncio.run(_until_signal(config.socket, str(config.listen), segments, bulk, frames))
    return 0


@dataclass(frozen=True, slots=True)
class Frames:
    """What callers are told of frames on the wire, and who makes them."""

    offer: pb.Frames
    framing: Framing | None


def frames_of(config: Config) -> Frames:
    wire = config.wire
    if wire.codec == "raw":
        return NO_FRAMES
    is_always = wire.codec == "lossless"
    framing = Framing(always=is_always)
    offer = pb.Frames(
        version=FRAMES_VERSION,
        always=is_always,
        link_bytes_per_s=wire.link_bytes_per_s,
        decoders=framing.threads,
    )
    return Frames(offer, framing)


def bulk_server(config: Config, segments: Segments, framing: Framing | None) -> BulkServer | None:
    """None where the settings have it off."""
    if config.bulk_listen is None:
        return None
    tls = config.bulk_tls
    certificate = None
    if tls.certificate is not None:
        certificate = Certificate(tls.certificate, tls.key or tls.certificate)
    # numpy and sockets let go of the interpreter; what little is left must not hold up the loop for 5 ms at a time.
    sys.setswitchinterval(0.0005)
    return BulkServer(
        config.bulk_listen.host,
        config.bulk_listen.port,
        daemon=config.socket,
        segments=segments,
        certificate=certificate,
        clock=SystemClock(),
        framing=framing,
    )


NO_FRAMES = Frames(pb.Frames(), None)


async def _until_signal(
    socket_path: Path,
    listen: str,
    segments: Segments,
    bulk: BulkServer | None,
    frames: Frames,
) -> None:
    notifier = Notifier.from_environment()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready(bound: str) -> None:
        notifier.ready(f"serving at {bound}")
        log.info("ready", listen=bound)

    await serve_front(
        socket_path,
        listen,
        stop=stop,
        ready=ready,
        segments=segments,
        bulk=bulk,
        frames=frames,
    )


async def serve_front(
    socket_path: Path,
    listen: str,
    *,
    stop: asyncio.Event,
    ready: Callable[[str], None] = lambda _: None,
    grace_s: float = 2.0,
    segments: Segments,
    bulk: BulkServer | None = None,
    frames: Frames = NO_FRAMES,
) -> None:
    """Serves at `listen` (host:port, or unix:///path) until `stop` is set; calls `ready` with the bound address. Starts and ends `bulk` too.

    Needs no daemon to start: while there is none, calls are Unavailable and the health service says so. Raises ConfigError for an
    address that is taken, or lies beyond loopback, where only TLS may listen.
    """
    check_is_loopback(listen)
    check_is_free(listen)
    upstream = Upstream(socket_path)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", PAYLOAD_BYTES_MAX),
            ("grpc.max_send_message_length", PAYLOAD_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ],
        maximum_concurrent_rpcs=_RPCS_MAX,
    )
    streams = Streams(upstream, segments, frames.framing)
    server.add_generic_rpc_handlers((_handlers(upstream, streams, _near(upstream, bulk, frames)),))
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection(
        (
            SERVICE,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        ),
        server,
    )
    bound = _bound(server, listen)
    if bulk is not None:
        bulk.start()
    await server.start()
    ready(bound)
    try:
        async with asyncio.TaskGroup() as tasks:
            probe = tasks.create_task(
                _probe(upstream, checks, bulk, frames), name="front health probe"
            )
            await stop.wait()
            probe.cancel()
    finally:
        await checks.enter_graceful_shutdown()
        await server.stop(grace_s)
        if bulk is not None:
            await asyncio.get_running_loop().run_in_executor(None, bulk.close)
        streams.close()
        upstream.close()


def check_is_loopback(listen: str) -> None:
    """Raises ConfigError for an address that others than this host can reach."""
    if listen.startswith("unix:"):
        return
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"a listen address is host:port, not {listen!r}; try 127.0.0.1:7439")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"a listen address does not resolve listen={listen}: {error}") from error
    beyond = [str(a[4][0]) for a in found if not ipaddress.ip_address(a[4][0]).is_loopback]
    if beyond:
        raise ConfigError(
            f"listening beyond loopback needs TLS listen={listen} address={beyond[0]}; "
            "listen on 127.0.0.1:7439, or on unix:///path"
        )


def check_is_free(listen: str) -> None:
    """Raises ConfigError with the flag for an address that is taken or not this machine's: gRPC tells less, in several lines."""
    if listen.startswith("unix:"):
        refuse_served(path_of(listen), "listen")
        return
    host, _, port = listen.rpartition(":")
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), int(port), type=socket.SOCK_STREAM
    )[0]
    try:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        raise ConfigError(
            f"gRPC cannot listen: listen={listen} error={error.strerror}; give another --listen, or off"
        ) from error


def _bound(server: Any, listen: str) -> str:  # a grpc.aio.Server: grpc ships no types
    try:
        port: int = server.add_insecure_port(listen)
    except RuntimeError as error:
        raise ConfigError(f"the address cannot be bound listen={listen}: {error}") from error
    if listen.startswith("unix:"):
        path_of(listen).chmod(0o600)
        return listen
    return f"{listen.rpartition(':')[0]}:{port}"


def _near(upstream: Upstream, bulk: BulkServer | None, frames: Frames) -> pb.OpenSessionResponse:
    """What callers are told of other ways to their bytes."""
    near = pb.OpenSessionResponse(
        local_socket=str(upstream.path), host=host_id(), frames=frames.offer
    )
    if bulk is not None:
        near.bulk_port, near.bulk_host = bulk.address.port, bulk.address.host
        near.bulk_id, near.bulk_certificate = bulk.address.id, bulk.address.certificate
    return near


def _handlers(
    upstream: Upstream, streams: Streams, near: pb.OpenSessionResponse
) -> Any:  # grpc ships no types
    unary: dict[str, Any] = {
        method.name: grpc.unary_unary_rpc_method_handler(_passing(upstream, method, near))
        for method in METHODS
        if method
        not in (SEGMENT, PROJECTION, KEEP_ALIVE, REPORT_BULK, ACQUIRE_STORED, GPU_POOL, WAIT_LAYERS)
    }
    return grpc.method_handlers_generic_handler(
        SERVICE,
        unary
        | {
            "KeepAlive": grpc.stream_stream_rpc_method_handler(
                _streaming(streams.keep_alive),
                pb.KeepAliveRequest.FromString,
                pb.KeepAliveResponse.SerializeToString,
            ),
            "Put": grpc.stream_unary_rpc_method_handler(
                _answering(streams.put),
                pb.PutRequest.FromString,
                pb.PutResponse.SerializeToString,
            ),
            "Get": grpc.unary_stream_rpc_method_handler(
                _streaming(streams.get),
                pb.GetRequest.FromString,
                pb.GetResponse.SerializeToString,
            ),
            "WatchEvents": grpc.unary_stream_rpc_method_handler(
                _streaming(streams.watch_events),
                pb.WatchEventsRequest.FromString,
                pb.Event.SerializeToString,
            ),
        },
    )


def _passing(upstream: Upstream, method: Method, near: pb.OpenSessionResponse) -> Unary:
    """Bytes through, except that a session opened here is tied to no connection of the local channel, and that its answer tells
    callers where they can share memory, or have a bulk connection."""

    async def passed(payload: bytes, context: Context) -> bytes:
        if method.name == "OpenSession":
            # Fields of a message may follow in any order, and the last of a kind counts.
            payload += pb.OpenSessionRequest(detached=True).SerializeToString()
            answer = await upstream.call_raw(method, payload, _timeout_s(context))
            return answer + near.SerializeToString()
        return await upstream.call_raw(method, payload, _timeout_s(context))

    return _answering(passed)


def tell_frames(framing: Framing | None, facts: pb.ReportBulkRequest) -> None:
    """What travelled as frames since the last time."""
    if framing is None:
        return
    received, sent = framing.take_moved()
    facts.received_frames.CopyFrom(
        pb.FrameBytes(plain_bytes=received.plain_bytes, wire_bytes=received.wire_bytes)
    )
    facts.sent_frames.CopyFrom(
        pb.FrameBytes(plain_bytes=sent.plain_bytes, wire_bytes=sent.wire_bytes)
    )


def _answering(
    call: Callable[[Any, Context], Awaitable[Any]],
) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answered(request: Any, context: Context) -> Any:  # either bytes or messages
        try:
            return await call(request, context)
        except KvstoredError as error:
            await _fail(context, error)
        except Exception:
            log.exception("a gRPC call failed")
            await _fail(context, KvstoredError("internal error: the front's log has the details"))
        return None

    return answered


def _streaming(
    call: Callable[[Any, Context], AsyncIterator[Any]],
) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def streamed(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async for message in call(request, context):
                yield message
        except KvstoredError as error:
            await _fail(context, error)
        except Exception:
            log.exception("a gRPC stream failed")
            await _fail(context, KvstoredError("internal error: the front's log has the details"))

    return streamed


async def _fail(context: Context, error: KvstoredError) -> None:
    detail = failure_of(error).SerializeToString()
    await context.abort(
        grpc.StatusCode[status_of(error).grpc_code], str(error), ((ERROR_DETAIL_KEY, detail),)
    )


def _timeout_s(context: Context) -> float:
    remaining: float | None = context.time_remaining()
    return DEADLINE_S_MAX if remaining is None else min(max(remaining, 0.01), DEADLINE_S_MAX)


async def _probe(upstream: Upstream, checks: Any, bulk: BulkServer | None, frames: Frames) -> None:
    """The health service (`checks`) answers for the daemon, not for this process. The daemon hears what the bulk channel and frames did."""
    told = None
    while True:
        serving = health_pb2.HealthCheckResponse.SERVING
        try:
            async with upstream.link() as link:
                await link.call("Stat", pb.StatRequest(), pb.StatResponse, 2.0)
                facts = bulk.report() if bulk is not None else pb.ReportBulkRequest()
                tell_frames(frames.framing, facts)
                await link.call("ReportBulk", facts, pb.ReportBulkResponse, 2.0)
        except Unavailable:
            serving = health_pb2.HealthCheckResponse.NOT_SERVING
        except KvstoredError:
            log.warning("the daemon answers no stat", exc_info=True)
            serving = health_pb2.HealthCheckResponse.NOT_SERVING
        if serving != told:
            told = serving
            for name in ("", SERVICE):
                await checks.set(name, serving)
        await asyncio.sleep(_PROBE_S)
