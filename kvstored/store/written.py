"""Bytes written to NVMe by the hour, kept over restarts beside the namespaces: a daemon that is restarted every hour has one day's budget all the same."""

from pathlib import Path

from kvstored.core.write_budget import WriteBudget
from kvstored.errors import InvalidArgument
from kvstored.store.registry import replace_file

FILE_NAME = "written.json"
BYTES_MAX = 1 << 16


def save(state_dir: Path, text: str) -> None:
    """Blocks; whole or not at all."""
    replace_file(state_dir / FILE_NAME, text.encode())


def restore(state_dir: Path, budget: WriteBudget, now_s: float) -> str:
    """Why the day begins anew; empty where it does not, or where nothing was kept."""
    try:
        with (state_dir / FILE_NAME).open("rb") as file:
            budget.load(file.read(BYTES_MAX).decode(), now_s)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError, InvalidArgument) as error:
        return f"{error}"
    return ""
