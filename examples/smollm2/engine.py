"""How an engine calls kvstored: look for the prompt's prefix, compute the rest, store it. Every call may fail; a failure is a miss."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from examples.smollm2.model import KV, Model
from examples.smollm2.weights import SHA256, Tensor
from kvstored.client import Client, GroupKind, GroupSpec, KvstoredError, Namespace, NamespaceSpec

BLOCK_TOKENS = 64
"""The unit of storing, and of computing: the prompt is computed block by block, so a block has the same bits whether its prefix was computed or loaded."""
TIERS = ("hbm", "dram", "nvme", "remote")


def namespace_spec(model: Model) -> NamespaceSpec:
    """What makes two blocks of KV interchangeable. Other weights, another dtype or order of elements must differ here."""
    kv_bytes = model.new_cache(BLOCK_TOKENS).nbytes
    return NamespaceSpec(
        model="smollm2-135m-instruct",
        revision=SHA256[:16],
        dtype="float16",
        layout="layer-kv-head-token-dim",
        layout_version=1,
        block_tokens=BLOCK_TOKENS,
        groups=(GroupSpec("kv", GroupKind.LINEAR, bytes_per_block=kv_bytes),),
        flops_base=2.0 * model.parameters,
        flops_slope=4.0 * model.layers * model.heads * model.dim,
    )


@dataclass(frozen=True, slots=True)
class Loaded:
    """How far the prompt's prefix came from the daemon, and from which of its tiers; `trouble` if it could not be asked."""

    tokens: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    loaded: Loaded
    ttft_s: float
    kv: KV
    """Of the prompt and the answer; what a follow-up would go on with."""


class Engine:
    """Greedy generation, one request at a time. Without a client it computes everything."""

    def __init__(self, model: Model, client: Client | None = None) -> None:
        self.model = model
        self._client = client
        self._spec = namespace_spec(model)
        self._namespace: Namespace | None = None

    def generate(
        self, prompt: str, tokens_max: int, on_block: Callable[[int], object] = lambda _: None
    ) -> Answer:
        """`on_block` is told how many tokens of the prompt are there so far."""
        began = perf_counter()
        ids = self.model.tokenizer.encode(prompt)
        kv = self.model.new_cache(len(ids) + tokens_max)
        loaded = self._load(ids, kv)
        for start in range(loaded.tokens, len(ids), BLOCK_TOKENS):
            logits = self.model.forward(ids[start : start + BLOCK_TOKENS], kv, start)
            on_block(min(start + BLOCK_TOKENS, len(ids)))
        ttft_s = perf_counter() - began
        self._store(ids, kv, loaded)
        answer = self._decode(logits, kv, len(ids), tokens_max)
        text = self.model.tokenizer.decode(answer)
        return Answer(
            tuple(answer), text, len(ids), loaded, ttft_s, kv[:, :, :, : len(ids) + len(answer)]
        )

    def _load(self, ids: list[int], kv: KV) -> Loaded:
        """Copies the longest stored prefix into the cache; never the last token, whose logits have to be computed."""
        if self._client is None:
            return Loaded()
        try:
            namespace = self._opened(self._client)
            keys = namespace.keys(ids[: (len(ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS])
            found = namespace.get_into(keys, [[_block(kv, i)] for i in range(len(keys))])
        except KvstoredError as error:
            return Loaded(trouble=str(error))
        hits = found.prefix_hits  # what was copied beyond the first miss is computed over
        tiers = [TIERS[tier] for tier in found.tiers[:hits]]
        return Loaded(
            hits * BLOCK_TOKENS,
            {tier: tiers.count(tier) * BLOCK_TOKENS for tier in sorted(set(tiers))},
        )

    def _store(self, ids: list[int], kv: KV, loaded: Loaded) -> None:
        """Puts the whole blocks that were computed. An engine in production does this on another thread."""
        first, end = loaded.tokens // BLOCK_TOKENS, len(ids) // BLOCK_TOKENS
        if self._client is None or first == end:
            return
        try:
            namespace = self._opened(self._client)
            keys = namespace.keys(ids[: end * BLOCK_TOKENS])
            namespace.put_from(keys[first:], [[_block(kv, i)] for i in range(first, end)])
        except KvstoredError:
            return  # it is a cache: the next request computes what this one could not store

    def _opened(self, client: Client) -> Namespace:
        """When first needed: the daemon may come up after the engine. It opens again by itself after a restart of the daemon."""
        if self._namespace is None:
            self._namespace = client.open_namespace(self._spec)
        return self._namespace

    def _decode(self, logits: Tensor, kv: KV, position: int, tokens_max: int) -> list[int]:
        answer: list[int] = []
        while len(answer) < tokens_max:
            best = int(logits.argmax())
            if best == self.model.tokenizer.end:
                break
            answer.append(best)
            logits = self.model.forward([best], kv, position)
            position += 1
        return answer


def _block(kv: KV, index: int) -> KV:
    """A block's place in the cache: strided, and copied as it lies, without being joined first."""
    return kv[:, :, :, index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
