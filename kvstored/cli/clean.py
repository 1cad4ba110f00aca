"""`kvstored clean`: removes what a daemon left in its state directory, and nothing else that may lie there."""

import re
from dataclasses import dataclass
from pathlib import Path

import click

from kvstored import units
from kvstored.cli.checks import INDEX
from kvstored.cli.options import loaded, settings_flags
from kvstored.cli.output import ask, json_option, show, yes_option
from kvstored.config import Config
from kvstored.errors import ConfigError
from kvstored.statedir import StateLock

_STATE = re.compile(r"(namespaces\.json(\.copy)?|policy\.state|epoch)(\.next)?")
_DISK = re.compile(r"slab-\d{5}\.(dat|new)|direct\.probe")
_INDEX = re.compile(r"(data|lock)\.mdb")


@dataclass(frozen=True, slots=True)
class Leftovers:
    """`kept`: what lies in the state directory and was not made by kvstored, or is not within it."""

    files: tuple[Path, ...]
    kept: tuple[Path, ...]
    size_bytes: int


@click.command()
@settings_flags("state_dir")
@yes_option
@json_option
def clean(*, file: Path | None, is_agreed: bool, is_json: bool, **flags: str | None) -> None:
    """Remove all stored blocks and namespaces from the state directory, while no daemon runs on it.

    Only files of kvstored within the state directory go; a disk.path elsewhere is left alone, and so is the count of what was written to
    NVMe today (disk.write_budget).
    """
    config = loaded(file, flags).config
    found = Leftovers((), (), 0)
    if config.state_dir.is_dir():
        lock = StateLock.take(str(config.state_dir))
        try:
            found = leftovers(config)
            if found.files:
                size = units.format_about(found.size_bytes)
                question = f"Remove {len(found.files)} files ({size}) from {config.state_dir}?"
                ask(question, is_agreed=is_agreed)
            _remove_all(found, config)
        finally:
            lock.close()
    value = {
        "state_dir": str(config.state_dir),
        "removed": [str(path) for path in found.files],
        "kept": [str(path) for path in found.kept],
        "freed_bytes": found.size_bytes,
    }
    show(value, lambda: _text(found, config), is_json=is_json)


def leftovers(config: Config) -> Leftovers:
    state, disk = config.state_dir, config.disk.path
    files = [path for path in _files(state) if _STATE.fullmatch(path.name)]
    if config.socket.parent == state and config.socket.is_socket():
        files.append(config.socket)
    own = [path for path in _files(disk) if _DISK.fullmatch(path.name)]
    own += [path for path in _files(disk / INDEX) if _INDEX.fullmatch(path.name)]
    kept: list[Path] = []
    if _is_within(disk, state):
        files += own
        kept = [path for path in (*_files(disk), *_files(disk / INDEX)) if path not in own]
        kept = [path for path in kept if path != disk / INDEX]
    elif own:
        kept = [disk]
    size_bytes = sum(path.lstat().st_blocks * 512 for path in files)
    return Leftovers(tuple(files), tuple(kept), size_bytes)


def _text(found: Leftovers, config: Config) -> str:
    size = units.format_about(found.size_bytes)
    lines = [f"removed {len(found.files)} files, {size}, from {config.state_dir}"]
    return "\n".join(lines + [f"left alone: {path}" for path in found.kept])


def _files(directory: Path) -> list[Path]:
    if directory.is_symlink() or not directory.is_dir():
        return []
    return sorted(directory.iterdir())


def _is_within(path: Path, directory: Path) -> bool:
    return path != directory and path.resolve().is_relative_to(directory.resolve())


def _remove_all(found: Leftovers, config: Config) -> None:
    """The lock's file stays: another process may wait for it."""
    path = config.state_dir
    try:
        for path in found.files:
            path.unlink(missing_ok=True)
        for path in (config.disk.path / INDEX, config.disk.path):
            if _is_within(path, config.state_dir) and path.is_dir() and not _files(path):
                path.rmdir()
    except OSError as error:
        raise ConfigError(f"cannot be removed: path={path} error={error}") from error
