"""A gRPC front in a process of its own: `run_front.py SOCKET LISTEN`, prints the bound address, ends at SIGTERM."""

import asyncio
import signal
import sys
from pathlib import Path

from kvstored.errors import ConfigError
from kvstored.transport.front import serve_front


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await serve_front(
        Path(sys.argv[1]),
        sys.argv[2],
        stop=stop,
        ready=lambda address: print(address, flush=True),  # noqa: T201
    )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except ConfigError as error:
        sys.exit(f"ConfigError: {error}")
