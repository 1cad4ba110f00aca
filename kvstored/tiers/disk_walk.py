"""Reads every record of a disk index, in a process of its own: LMDB trusts its pages, and a damaged one may end the process that reads it."""

import subprocess
import sys
from pathlib import Path

import lmdb

WALK_S = 60.0
"""Some ten million records. An index that takes longer is not known to be damaged."""


def fault_of(directory: Path) -> str:
    """What a walk through the index met; empty where it is sound."""
    command = [sys.executable, "-P", "-m", __name__, str(directory)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=WALK_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines()
    return f"walk ended with code={done.returncode}: {said[-1] if said else 'no word'}"


def _walk(directory: str) -> None:
    with lmdb.open(directory, readonly=True, lock=False, max_dbs=2, readahead=False) as env:
        records = env.open_db(b"records", create=False)
        with env.begin(db=records) as txn, txn.cursor() as rows:
            for _ in rows.iternext():
                pass


if __name__ == "__main__":
    _walk(sys.argv[1])
