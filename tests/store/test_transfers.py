"""In which order parts of blocks come up: dense ones first and whole, then sparse ones by what attention selects and by class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvstored.core.calls import Reason
from kvstored.core.types import Part, Place, TierId
from kvstored.tiers.base import PieceRef, Views
from tests.store.world import World, hybrid_spec, keys_of, running


def test_dense_parts_come_first_then_selected_sparse_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, arena_blocks=64, disk_blocks=128)
    world.grow()
    asked: list[tuple[int, int]] = []

    async def main() -> None:
        layout, session = await world.open(hybrid_spec()), world.session()
        world.put(session, layout, range(4))
        await world.janitor.write_back_once()
        await world.settle()
        books = world.catalog.books
        rows = books.index.find(keys_of(layout, range(4)).fingerprints)
        for row in rows[::-1].tolist():
            for copy in list(books.copies_of(row)):
                if int(books.copies.tier[copy]) == TierId.DRAM:
                    world.catalog.drop_copy(copy, Reason.DEMAND, world.clock.now_s())
                    world.shell.apply()
        mask = np.asarray([[False, False, True, True], [False, False, False, True]])
        world.catalog.feedback.selected(rows, Part.SPARSE, mask, 1.0, world.clock.now_s())
        numbers = {
            books.index.fingerprints[row].tobytes(): i for i, row in enumerate(rows.tolist())
        }
        read = world.disk.read

        def noted(items: Sequence[tuple[PieceRef, Place, Views]]) -> object:
            asked.extend((ref.group, numbers[ref.fingerprint]) for ref, _, _ in items)
            return read(items)

        monkeypatch.setattr(world.disk, "read", noted)
        grant = await world.acquire(session, layout, range(4))
        for i, block in enumerate(grant.blocks):
            world.check_content(block, i)
        world.store.release(session, [grant.lease])
        await world.check_nothing_leaked()

    running(world, main)
    dense = [number for group, number in asked if group == 0]
    sparse = [number for group, number in asked if group == 1]
    assert dense == [0, 1, 2, 3]
    assert sparse == [3, 2, 0, 1]
    assert asked.index((1, 3)) > asked.index((0, 3)), "all dense ones before any sparse one"
