"""Namespaces while the state directory cannot be written."""

from pathlib import Path

import pytest

from kvstored.errors import NotFound, Unavailable
from kvstored.store import registry
from kvstored.store.registry import COPY_NAME, FILE_NAME, SAVE_PAUSE_S, load
from tests.store.world import World, running, spec_of


class _Disk:
    """The state directory: full while `is_full`, or for one file only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.full_for = ""
        self.writes = 0
        real = registry.replace_file

        def replace_file(path: Path, content: bytes) -> None:
            self.writes += path.name == FILE_NAME
            if self.is_full or path.name == self.full_for:
                raise OSError(28, "No space left on device")
            real(path, content)

        monkeypatch.setattr(registry, "replace_file", replace_file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> _Disk:
    return _Disk(monkeypatch)


def saved(world: World) -> set[bytes]:
    return {layout.digest for layout in load(world.state_dir).namespaces.list()}


def test_a_namespace_that_cannot_be_saved_is_open_and_saved_later(
    tmp_path: Path, disk: _Disk
) -> None:
    """OpenNamespace failed while the disk was full: no engine could start."""
    world = World(tmp_path)

    async def main() -> None:
        world.grow()
        disk.is_full = True
        first = await world.open(spec_of("first"))
        second = await world.open(spec_of("second"))
        assert world.put(world.session(), first, [1])
        assert not (tmp_path / FILE_NAME).exists()
        for _ in range(3):
            await world.janitor.expire_once()
        assert disk.writes == 1, "a full directory is left alone for a while"
        world.clock.advance(SAVE_PAUSE_S)
        await world.janitor.expire_once()
        assert disk.writes == world.shell.counts["namespace_save_failures", ""] == 2
        assert len(world.faults) == 1, "told once"
        disk.is_full = False
        world.clock.advance(SAVE_PAUSE_S)
        await world.janitor.expire_once()
        assert saved(world) == {first.digest, second.digest}
        await world.janitor.expire_once()
        assert disk.writes == 3, "what is saved is not saved again"

    running(world, main)


def test_retire_and_remove_happen_whole_or_not_at_all(tmp_path: Path, disk: _Disk) -> None:
    """They changed the books first: an error to the caller, and another answer after a restart than before."""
    world = World(tmp_path)

    async def main() -> None:
        world.grow()
        layout = await world.open()
        world.put(world.session(), layout, [1, 2])
        known = world.store.registry
        disk.is_full = True
        with pytest.raises(Unavailable):
            await known.retire(layout.digest, tenant="default")
        with pytest.raises(Unavailable):
            await known.remove(layout.digest, tenant="default")
        assert list(known.list(tenant="default")) == [(layout, False)]
        assert world.catalog.blocks == 2
        disk.is_full = False
        await known.retire(layout.digest, tenant="default")
        assert load(tmp_path).namespaces.is_retired(layout.digest)
        assert await known.remove(layout.digest, tenant="default") == 2
        assert saved(world) == set()
        with pytest.raises(NotFound):
            known.get(layout.digest, tenant="default")

    running(world, main)


def test_a_damaged_file_is_read_from_its_copy(tmp_path: Path) -> None:
    """One byte of it cost every block on disk."""
    world = World(tmp_path)

    async def main() -> None:
        world.grow()
        layout = await world.open()
        file, copy = tmp_path / FILE_NAME, tmp_path / COPY_NAME
        file.write_bytes(file.read_bytes().replace(b"model", b"nodel", 1))
        loaded = load(tmp_path)
        assert saved(world) == {layout.digest}
        assert loaded.is_copy
        assert str(file) in loaded.fault
        copy.write_bytes(b"{")
        loaded = load(tmp_path)
        assert (list(loaded.namespaces.list()), loaded.is_copy) == ([], False)
        file.unlink()
        assert not load(tmp_path).fault, "nothing is there to be read"

    running(world, main)


def test_without_room_for_the_copy_the_file_counts(tmp_path: Path, disk: _Disk) -> None:
    world = World(tmp_path)

    async def main() -> None:
        world.grow()
        disk.full_for = COPY_NAME
        layout = await world.open()
        assert saved(world) == {layout.digest}
        assert len(world.faults) == 1
        assert await world.store.registry.remove(layout.digest, tenant="default") == 0
        assert saved(world) == set()

    running(world, main)
