"""What vLLM's scheduler tells its workers to load and store: values, and the arithmetic of blocks and pages behind them. Imports no vLLM.

*Block*: of the namespace, `block_tokens` long, the smallest length that all KV cache groups of the model have a whole number of pages in.
*Page*: what vLLM calls a block of one group. Its hash of a block is the hash of the block's last tokens, which is chained over all before.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstored.client import Keys, NamespaceSpec

Page = int | None
"""A page's number; None where there is none, or none that this plan is about."""
Pages = tuple[tuple[tuple[Page, ...], ...], ...]
"""Of each block: of each group: its pages in order."""


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """`layer_bytes`: of one page, of each layer of the group in the group's order."""

    name: str
    page_tokens: int
    layer_names: tuple[str, ...]
    layer_bytes: tuple[int, ...]
    is_sharded: bool

    def piece_bytes(self, block_tokens: int) -> int:
        return sum(self.layer_bytes) * (block_tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """How the engine's KV maps to the namespace; equal on the scheduler and on every worker."""

    spec: NamespaceSpec
    groups: tuple[GroupLayout, ...]
    hash_tokens: int
    """Of each of the engine's hashes."""

    @property
    def block_tokens(self) -> int:
        return self.spec.block_tokens

    @property
    def group_names(self) -> tuple[str, ...]:
        return tuple(group.name for group in self.groups)


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one path. `hashes` of these blocks, `parent` of the block before, empty for a root; `content_keys` of what is to be
    stored, where the tokens say it all."""

    first_block: int
    hashes: tuple[bytes, ...]
    parent: bytes
    extra_keys: tuple[bytes, ...]
    content_keys: tuple[bytes, ...] = ()

    def keys(self) -> Keys:
        return Keys(
            self.hashes,
            self.parent,
            extra_keys=self.extra_keys,
            first_block=self.first_block,
            content_keys=self.content_keys,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """`in_step`: the step that it comes with needs it, layer by layer; else the request waits until it is reported."""

    request: str
    run: Run
    pages: Pages
    in_step: bool


@dataclass(frozen=True, slots=True)
class Store:
    """`is_last`: the request has ended, and its pages are kept for it until this is reported."""

    request: str
    run: Run
    pages: Pages
    is_last: bool


@dataclass(slots=True)
class Plans:
    """Of one step."""

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)


def run_of(
    hashes: Sequence[bytes],
    layout: EngineLayout,
    first: int,
    last: int,
    extra_keys: tuple[bytes, ...] = (),
) -> Run:
    """Blocks `first` up to `last` of the path with these engine hashes."""
    step = layout.block_tokens // layout.hash_tokens
    chosen = tuple([bytes(hashes[(i + 1) * step - 1]) for i in range(first, last)])
    parent = bytes(hashes[first * step - 1]) if first else b""
    return Run(first, chosen, parent, extra_keys)


def hashed_blocks(hashes: Sequence[bytes], layout: EngineLayout) -> int:
    """Whole blocks that the engine has hashed."""
    return len(hashes) * layout.hash_tokens // layout.block_tokens


def pages_of(
    tables: Sequence[Sequence[Page]],
    layout: EngineLayout,
    first: int,
    last: int,
    *,
    from_token: int = 0,
) -> Pages:
    """Pages of blocks `first` up to `last` in the request's block tables, one a group; those that begin before `from_token` left out."""
    found = []
    for block in range(first, last):
        row = []
        for group, table in zip(layout.groups, tables, strict=True):
            each = layout.block_tokens // group.page_tokens
            numbers = range(block * each, (block + 1) * each)
            row.append(
                tuple(
                    [
                        table[i] if i < len(table) and i * group.page_tokens >= from_token else None
                        for i in numbers
                    ]
                )
            )
        found.append(tuple(row))
    return tuple(found)


def wanted_runs(pages: Pages) -> list[tuple[int, int, tuple[int, ...]]]:
    """Runs of blocks of which the same groups are wanted: first, behind the last, groups. Blocks of which nothing is wanted are in none."""
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for i, row in enumerate(pages):
        wanted = tuple(g for g, numbers in enumerate(row) if any(n is not None for n in numbers))
        if runs and runs[-1][1] == i and runs[-1][2] == wanted:
            runs[-1] = (runs[-1][0], i + 1, wanted)
        elif wanted:
            runs.append((i, i + 1, wanted))
    return runs


def has_all(pages: Sequence[Page]) -> bool:
    return all(page is not None for page in pages)
