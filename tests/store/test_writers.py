"""Writers: the death of a process that may write to shared memory is seen at once."""

import asyncio
import os
import subprocess
import sys

from kvstored.store.writers import Writers


def test_a_killed_process_is_reported_once() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    async def main() -> None:
        died: asyncio.Queue[int] = asyncio.Queue()
        writers = Writers(died.put_nowait)
        assert writers.watch(process.pid)
        assert writers.watch(process.pid)
        assert not writers.is_dead(process.pid)
        process.kill()
        assert await asyncio.wait_for(died.get(), 10) == process.pid
        assert died.empty()
        assert len(writers) == 0

    asyncio.run(main())
    process.wait()


def test_processes_that_cannot_be_seen_are_not_watched() -> None:
    async def main() -> None:
        writers = Writers(lambda pid: None)
        assert not writers.watch(0)
        assert not writers.watch(2**22 - 1)
        assert writers.watch(os.getpid())
        writers.close()

    asyncio.run(main())
