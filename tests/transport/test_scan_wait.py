"""Puts that come while memory is scanned after a restart."""

import asyncio
from pathlib import Path

import pytest

from kvstored.core.calls import FillStatus
from kvstored.core.types import TierId

from .test_service import Peer, keys_of, serving


def test_a_put_waits_for_the_scan_of_memory(tmp_path: Path) -> None:
    """It found no space in the milliseconds after a restart."""

    async def test(peer: Peer) -> None:
        catalog = peer.world.shell.catalog
        catalog.recovery.begin(TierId.DRAM)
        putting = asyncio.ensure_future(peer.put(range(3)))
        await asyncio.sleep(0.03)
        assert not putting.done()
        catalog.recovery.done(TierId.DRAM, peer.world.shell.now_s())
        assert await putting == bytes([FillStatus.COMMITTED] * 3)

    serving(tmp_path, test)


def test_a_put_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.transport.asked.SCAN_WAIT_S", 0.02)

    async def test(peer: Peer) -> None:
        peer.world.shell.catalog.recovery.begin(TierId.DRAM)
        reserved = await peer.call("Reserve", peer.reserve(keys_of(range(2))))
        assert reserved.status == bytes([FillStatus.NO_SPACE] * 2)
        peer.world.shell.catalog.recovery.done(TierId.DRAM, peer.world.shell.now_s())

    serving(tmp_path, test)
