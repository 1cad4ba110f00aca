"""A gRPC front in a process of its own: `run_front.py SOCKET LISTEN [SETTING VALUE ...]`, prints the bound address, ends at SIGTERM."""

import asyncio
import signal
import sys
from pathlib import Path

from kvstored.client.segments import Segments
from kvstored.config import load
from kvstored.errors import ConfigError
from kvstored.transport.front import bulk_server, frames_of, serve_front


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    told = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
    flags = {"state_dir": "/nowhere", "socket": sys.argv[1], **told}
    segments = Segments()
    config = load(flags=flags, environ={}).config
    frames = frames_of(config)
    await serve_front(
        Path(sys.argv[1]),
        sys.argv[2],
        stop=stop,
        segments=segments,
        bulk=bulk_server(config, segments, frames.framing),
        frames=frames,
        ready=lambda address: print(address, flush=True),  # noqa: T201
    )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
