"""Namespaces while the state directory cannot be written."""

from pathlib import Path

import pytest

from kvstored.errors import NotFound, Unavailable
from kvstored.store import registry
from kvstored.store.registry import FILE_NAME, SAVE_PAUSE_S, load
from tests.store.world import World, running, spec_of


class _Disk:
    """The state directory: full while `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.writes = 0
        real = registry.replace_file

        def replace_file(path: Path, content: bytes) -> None:
            self.writes += 1
            if self.is_full:
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
