"""The namespaces of this store: the registry, its file in the state directory, and telling the catalog."""

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstored.core.namespace import Namespaces, Opened
from kvstored.core.types import Layout, NamespaceSpec
from kvstored.errors import Busy, Corrupt, InvalidArgument, NotFound, Unavailable
from kvstored.store.events import EventKind
from kvstored.store.shell import Shell

FILE_NAME = "namespaces.json"
COPY_NAME = "namespaces.json.copy"
"""Of the same text: a file that cannot be read would cost every block on disk, which it says whose they are."""
SAVE_PAUSE_S = 5.0
"""After a failure: a state directory that is full is not asked every second."""


PIECE_BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Loaded:
    """`fault`: why the file could not be used. Without its copy too the registry is empty, and so is the store."""

    namespaces: Namespaces
    fault: str = ""
    is_copy: bool = False


def load(state_dir: Path) -> Loaded:
    """Blocks; for the start."""
    try:
        return Loaded(_read(state_dir / FILE_NAME))
    except FileNotFoundError:  # nothing was opened yet, or somebody took it away
        return Loaded(Namespaces())
    except (Corrupt, OSError) as error:
        fault = f"path={state_dir / FILE_NAME} error={error}"
    try:
        return Loaded(_read(state_dir / COPY_NAME), fault, is_copy=True)
    except (Corrupt, OSError) as error:
        return Loaded(Namespaces(), f"{fault} copy={error}")


def _read(path: Path) -> Namespaces:
    return Namespaces.from_json(path.read_bytes())


class Registry:
    """A namespace is on disk before its opening is answered, so that a restart knows whose the records in the tiers are. Where the state
    directory cannot be written, an engine is served all the same: its namespace is saved later, and lost if a restart comes first.
    """

    def __init__(self, shell: Shell, namespaces: Namespaces, state_dir: Path) -> None:
        self._shell = shell
        self._namespaces = namespaces
        self.state_dir = state_dir
        self._saving = asyncio.Lock()
        self._is_unsaved = False
        """Some opening is in memory only."""
        self._is_failing = False
        self._save_after_s = 0.0
        for layout in namespaces.list():
            self._add(layout)
            if namespaces.is_retired(layout.digest):
                shell.catalog.retire(layout.id)
                shell.apply()

    def get(self, digest: bytes, *, tenant: str) -> Layout:
        """NotFound for another tenant's, as if it were not there."""
        layout = self._namespaces.get(digest)
        if layout.spec.tenant != tenant:
            raise NotFound(f"namespace is not open namespace={digest.hex()}")
        return layout

    def list(self, *, tenant: str) -> Iterable[tuple[Layout, bool]]:
        """With whether each is retired."""
        return tuple(
            (layout, self._namespaces.is_retired(layout.digest))
            for layout in self._namespaces.list()
            if layout.spec.tenant == tenant
        )

    def by_digest(self, digest: bytes) -> Layout | None:
        """For recovery: whose record is this."""
        try:
            return self._namespaces.get(digest)
        except NotFound:
            return None

    async def open(self, spec: NamespaceSpec, *, supersede: bool) -> Opened:
        for group in spec.groups:
            if group.bytes_per_block > PIECE_BYTES_MAX:
                raise InvalidArgument(
                    f"a block of this group is too large: group={group.name!r} "
                    f"bytes_per_block={group.bytes_per_block} max={PIECE_BYTES_MAX}"
                )
        opened = self._namespaces.open(spec, supersede=supersede)
        if opened.created or opened.revived:
            self._add(opened.layout)
        for layout in opened.retired:
            self._shell.catalog.retire(layout.id)
        self._shell.apply()
        if opened.created:
            self._shell.events.add(EventKind.NAMESPACE_OPENED, digest=opened.layout.digest)
        self._is_unsaved |= bool(opened.created or opened.revived or opened.retired)
        await self.save()
        return opened

    async def retire(self, digest: bytes, *, tenant: str) -> None:
        """Unavailable, and nothing is changed, where it cannot be saved: after a restart it would be in use again."""
        async with self._saving:
            layout = self.get(digest, tenant=tenant)
            await self._write(self._text_after(lambda changed: changed.retire(digest)))
            self._namespaces.retire(digest)
            self._shell.catalog.retire(layout.id)
            self._shell.apply()

    async def remove(self, digest: bytes, *, tenant: str) -> int:
        """Blocks that went with it. Unavailable, and nothing is changed, where it cannot be saved: after a restart it would be back."""
        async with self._saving:
            layout = self.get(digest, tenant=tenant)
            await self._write(self._text_after(lambda changed: changed.remove(digest)))
            self._namespaces.remove(digest)
        blocks = await self._shell.clear(layout.id)
        blocks += self._shell.catalog.remove_namespace(layout.id, self._shell.now_s())
        self._shell.apply()
        del self._shell.layouts[layout.id]
        self._shell.tiers.coding.forget(layout.digest)
        self._shell.events.add(EventKind.NAMESPACE_REMOVED, digest=layout.digest)
        return blocks

    async def save(self) -> None:
        """Write what is in memory only. A failure is counted and, the first of several in a row, reported; each opening and the janitor
        try again."""
        async with self._saving:
            if not self._is_unsaved or self._shell.elapsed_s() < self._save_after_s:
                return
            self._is_unsaved = False  # what is opened while it is written sets it again
            try:
                await self._write(self._namespaces.to_json())
            except (Unavailable, Busy) as error:
                self._is_unsaved = True
                self._save_after_s = self._shell.elapsed_s() + SAVE_PAUSE_S
                self._shell.counts["namespace_save_failures", ""] += 1
                if not self._is_failing:
                    self._shell.report(
                        "namespaces are in memory only: a restart forgets them", error
                    )
                self._is_failing = True
            except BaseException:
                self._is_unsaved = True
                raise

    def _add(self, layout: Layout) -> None:
        self._shell.layouts[layout.id] = layout
        self._shell.tiers.coding.learn(layout)
        self._shell.catalog.add_namespace(layout)
        self._shell.apply()

    def _text_after(self, change: Callable[[Namespaces], Layout]) -> str:
        """The file's text after a change that is not yet made."""
        changed = Namespaces.from_json(self._namespaces.to_json())
        change(changed)
        return changed.to_json()

    async def _write(self, text: str) -> None:
        """To the file, which counts, and then to its copy, without which it is saved all the same."""
        lane = self._shell.tiers.arena_lane
        try:
            fault = await lane.submit(lambda: _save(self.state_dir, text.encode()))
        except OSError as error:
            raise Unavailable(f"namespaces cannot be saved: error={error}") from error
        self._is_failing, self._save_after_s = False, 0.0
        if fault is not None:
            self._shell.report("the copy of namespaces.json is an older one", fault)


def _save(state_dir: Path, content: bytes) -> OSError | None:
    """Why there is no copy, where there is none; raises where there is no file."""
    replace_file(state_dir / FILE_NAME, content)
    try:
        replace_file(state_dir / COPY_NAME, content)
    except OSError as error:
        return error
    return None


def replace_file(path: Path, content: bytes) -> None:
    """Whole or not at all, also over a power failure."""
    beside = path.with_name(path.name + ".next")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
