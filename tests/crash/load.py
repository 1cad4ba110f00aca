"""One client process under load: puts, gets and views of verified blocks, telling its parent what was acknowledged.

Lines on standard output: `put SIZE KEY...` after an acknowledged put, `path SIZE KEY...` before it is tried, `wrong SIZE KEY` for bytes
that are not the key's. Ends when its standard input does, or is killed.
"""

import random
import sys
import threading
import time
from collections.abc import Iterator

from kvstored.client import Client, FillStatus, Keys, Namespace
from kvstored.client.results import Block
from kvstored.errors import KvstoredError, LeaseLost
from tests.crash.blocks import content_of, conversations, is_right, spec_of, tokens_of

STORED = (FillStatus.COMMITTED, FillStatus.PRESENT)
_IDLE_S = 0.01


class Load:
    """`budget_bytes`: of new blocks; what is beyond it is only read."""

    def __init__(self, client: Client, size_bytes: int, seed: int, budget_bytes: int) -> None:
        self._client = client
        self._size_bytes = size_bytes
        self._rng = random.Random(seed)
        self._paths = conversations(seed)
        self._left_bytes = budget_bytes
        self._known: list[Keys] = []
        self._namespace: Namespace | None = None

    def step(self) -> None:
        """One act; errors are the caller's, and end nothing."""
        if self._namespace is None:
            self._namespace = self._client.open_namespace(spec_of(self._size_bytes))
        if self._left_bytes > 0 and (not self._known or self._rng.random() < 0.5):
            self._put(self._namespace)
        elif self._rng.random() < 0.7:
            self._get(self._namespace, self._rng.choice(self._known))
        else:
            self._view(self._namespace, self._rng.choice(self._known))

    def _put(self, namespace: Namespace) -> None:
        keys = namespace.keys(tokens_of(next(self._paths)))
        self._known.append(keys)
        self._tell("path", keys)
        rows = [content_of(key, self._size_bytes) for key in keys]
        status = namespace.put(keys, rows).status
        self._left_bytes -= self._size_bytes * status.count(FillStatus.COMMITTED)
        stored = [key for key, each in zip(keys, status, strict=True) if each in STORED]
        self._tell("put", stored)

    def _get(self, namespace: Namespace, keys: Keys) -> None:
        found = namespace.get(keys, verify=self._rng.random() < 0.8)
        self._check(zip(keys, found.blocks, strict=True))

    def _view(self, namespace: Namespace, keys: Keys) -> None:
        """What a view showed counts only when it ended with its lease held."""
        wrong: list[bytes] = []
        try:
            with namespace.get_view(keys) as view:
                for key, block in zip(keys, view.blocks, strict=True):
                    if block is not None and not is_right(key, block[0]):
                        wrong.append(key)
        except LeaseLost:
            return
        for key in wrong:
            self._tell("wrong", [key])

    def _check(self, found: Iterator[tuple[bytes, Block | None]]) -> None:
        for key, block in found:
            if block is not None and not is_right(key, block[0]):
                self._tell("wrong", [key])

    def _tell(self, what: str, keys: "Keys | list[bytes]") -> None:
        words = " ".join(key.hex() for key in keys)
        sys.stdout.write(f"{what} {self._size_bytes} {words}\n")
        sys.stdout.flush()


def main(address: str, size_bytes: int, seed: int, budget_bytes: int) -> None:
    with Client(address, timeout_s=10.0) as client:
        load = Load(client, size_bytes, seed, budget_bytes)
        parent = threading.Thread(target=sys.stdin.read, daemon=True)
        parent.start()
        while parent.is_alive():
            try:
                load.step()
            except KvstoredError:
                time.sleep(_IDLE_S)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
