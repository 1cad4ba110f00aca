"""The namespaces of this store: the registry, its file in the state directory, and telling the catalog."""

import asyncio
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstored.core.namespace import Namespaces, Opened
from kvstored.core.types import Layout, NamespaceId, NamespaceSpec
from kvstored.errors import Corrupt, InvalidArgument, NotFound, Unavailable
from kvstored.store.events import EventKind
from kvstored.store.shell import Shell

FILE_NAME = "namespaces.json"


@dataclass(frozen=True, slots=True)
class Loaded:
    """`fault`: why the file could not be used; the registry is empty then, and so is the store."""

    namespaces: Namespaces
    fault: str


def load(state_dir: Path) -> Loaded:
    """Blocks; for the start."""
    path = state_dir / FILE_NAME
    try:
        return Loaded(Namespaces.from_json(path.read_bytes()), "")
    except FileNotFoundError:
        return Loaded(Namespaces(), "")
    except (Corrupt, OSError) as error:
        return Loaded(Namespaces(), f"namespaces cannot be read: path={path} error={error}")


class Registry:
    """A namespace is on disk before its opening is answered: records in the tiers name it by digest only."""

    def __init__(
        self, shell: Shell, namespaces: Namespaces, state_dir: Path, *, piece_bytes_max: int
    ) -> None:
        self._shell = shell
        self._namespaces = namespaces
        self._state_dir = state_dir
        self._piece_bytes_max = piece_bytes_max
        self._saving = asyncio.Lock()
        self._unsaved: set[bytes] = set()
        """Digests of the namespaces whose last change is not on disk."""
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
            if group.bytes_per_block > self._piece_bytes_max:
                raise InvalidArgument(
                    f"a block of this group is too large: group={group.name!r} "
                    f"bytes_per_block={group.bytes_per_block} max={self._piece_bytes_max}"
                )
        opened = self._namespaces.open(spec, supersede=supersede)
        if opened.created or opened.revived:
            self._add(opened.layout)
        for layout in opened.retired:
            self._shell.catalog.retire(layout.id)
        self._shell.apply()
        if opened.created:
            self._shell.events.add(EventKind.NAMESPACE_OPENED, digest=opened.layout.digest)
        if opened.created or opened.revived or opened.retired:
            self._unsaved.add(opened.layout.digest)
        await self._save(opened.layout.digest)
        return opened

    async def retire(self, digest: bytes, *, tenant: str) -> None:
        layout = self.get(digest, tenant=tenant)
        self._namespaces.retire(layout.digest)
        self._shell.catalog.retire(layout.id)
        self._shell.apply()
        self._unsaved.add(layout.digest)
        await self._save(layout.digest)

    async def remove(self, digest: bytes, *, tenant: str) -> int:
        """Blocks that went with it."""
        layout = self.get(digest, tenant=tenant)
        self._namespaces.remove(layout.digest)
        blocks = await self._shell.clear(layout.id)
        blocks += self._shell.catalog.remove_namespace(layout.id, self._shell.now_s())
        self._shell.apply()
        del self._shell.layouts[layout.id]
        self._shell.events.add(EventKind.NAMESPACE_REMOVED, digest=layout.digest)
        self._unsaved.add(layout.digest)
        await self._save(layout.digest)
        return blocks

    def digest_of(self, ns: NamespaceId) -> bytes:
        layout = self._shell.layouts.get(ns)
        return layout.digest if layout else b""

    def _add(self, layout: Layout) -> None:
        self._shell.layouts[layout.id] = layout
        self._shell.catalog.add_namespace(layout)
        self._shell.apply()

    async def _save(self, digest: bytes) -> None:
        """Write what is not yet on disk; a failure is the caller's where its own namespace is among it, and the next call tries again."""
        async with self._saving:
            if not self._unsaved:
                return
            text = self._namespaces.to_json()
            saved, self._unsaved = self._unsaved, set()
            lane = self._shell.tiers.arena_lane
            try:
                await lane.submit(lambda: replace_file(self._state_dir / FILE_NAME, text.encode()))
            except OSError as error:
                self._unsaved |= saved
                if digest in saved:
                    raise Unavailable(f"namespaces cannot be saved: error={error}") from error
            except BaseException:
                self._unsaved |= saved
                raise


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
