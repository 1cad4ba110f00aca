"""Reports of attention as lines of JSON, for analysis offline: proto/kvstored/v1/selection-log.schema.json is their schema.

Bounded: what does not fit into the buffer is left out, and a file that is full is moved aside once (`.1`).
"""

import base64
import json
from pathlib import Path

import numpy as np

from kvstored.core.feedback import Access
from kvstored.core.types import KeyBatch, Layout

VERSION = 1
BUFFER_LINES_MAX = 1024
FILE_BYTES_MAX = 64 << 20


class SelectionLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self.left_out = 0

    def add(self, layout: Layout, keys: KeyBatch, access: Access, now_s: float) -> None:
        if len(self._lines) >= BUFFER_LINES_MAX:
            self.left_out += 1
            return
        line: dict[str, object] = {
            "version": VERSION,
            "at_s": round(now_s, 3),
            "namespace": layout.digest.hex(),
            "group": layout.spec.groups[access.group].name,
            "blocks": _text(np.ascontiguousarray(keys.fingerprints[:, 0]).tobytes()),
            "count": len(keys),
        }
        if access.layer >= 0:
            line["layer"] = access.layer
        if access.selected is not None:
            packed = np.packbits(access.selected, axis=1, bitorder="little")
            line |= {"steps": len(packed), "selected": _text(packed.tobytes())}
        if access.mass is not None:
            line["mass"] = [round(float(each), 6) for each in access.mass]
        self._lines.append(json.dumps(line))

    def take(self) -> list[str]:
        """What is to be written, for `write`."""
        lines, self._lines = self._lines, []
        return lines

    def write(self, lines: list[str]) -> None:
        """Blocks."""
        if self._path.exists() and self._path.stat().st_size > FILE_BYTES_MAX:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()
