"""Run by an engine's Python: models of Transformers, with and without the connector."""

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.transformers import KvstoredCache
from kvstored.connectors.transformers_layers import selection

_SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
WINDOW = 48
BLOCK_TOKENS = 64


class Engine:
    """One model; `open` gives it a connector."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(7)
        if name == "llama":  # random weights, large steps, so that greedy choices are far apart
            self.model = LlamaForCausalLM(LlamaConfig(**_SIZES, initializer_range=0.2)).eval()
        elif name == "gemma":
            kinds = ["sliding_attention"] * 3 + ["full_attention"]
            config = Gemma3TextConfig(**_SIZES, layer_types=kinds, sliding_window=WINDOW)
            self.model = Gemma3ForCausalLM(config).eval()
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
        self.connector: KvstoredCache | None = None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text)
        return ids

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids)
        return text

    def open(
        self, options: dict[str, Any], wait_s: float, block_tokens: int = BLOCK_TOKENS
    ) -> bool:
        """Anew, as a new process would."""
        if self.connector is not None:
            self.connector.close()
        parsed = ConnectorOptions.parsed(options)
        self.connector = KvstoredCache(self.model, parsed, block_tokens=block_tokens)
        return self.connector.connected(wait_s)

    def connected(self, wait_s: float) -> bool:
        return self._cached.connected(wait_s)

    def alone(self, ids: list[int], tokens: int) -> dict[str, Any]:
        cache = DynamicCache(config=self.model.config)
        return self._generated(ids, tokens, cache, time.perf_counter(), 0)

    def tune(self, by: float) -> None:
        """Changes one layer's weights a little, as training would."""
        with torch.no_grad():
            self.model.model.layers[2].mlp.up_proj.weight.add_(by)

    def show(self, image_token: int | None) -> None:
        """This token stands for an image from now on."""
        self.model.config.image_token_id = image_token

    def ask(
        self, ids: list[int], tokens: int, static: bool = False, salt: str | None = None
    ) -> dict[str, Any]:
        """Load, generate, store."""
        extra_keys = [salt] if salt else []
        began = time.perf_counter()
        into = None
        if static:
            into = StaticCache(config=self.model.config, max_cache_len=len(ids) + tokens)
        cache = self._cached.load(ids, into=into, extra_keys=extra_keys)
        load_s = time.perf_counter() - began
        loaded = int(cache.get_seq_length())
        told = self._generated(ids, tokens, cache, began, loaded)
        stores = time.perf_counter()
        told["taken"] = self._cached.store(told["ids"], cache, extra_keys=extra_keys)
        told |= {"load_s": load_s, "store_s": time.perf_counter() - stores}
        told["flushed"] = self._cached.flush(20)
        return told

    def exact(self, ids: list[int], first: int) -> dict[str, Any]:
        """The first ids and then the rest, once in one cache, once with what the connector stored of the first in between."""
        kept = DynamicCache()
        self._logits(ids[:first], kept)
        self._cached.store(ids[:first], kept)
        self._cached.flush(20)
        loaded = self._cached.load(ids)
        tokens = int(loaded.get_seq_length())
        pairs = list(zip(kept.layers, loaded.layers, strict=True))
        same = all(
            torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs
        )
        without, again = self._logits(ids[first:], kept), self._logits(ids[first:], loaded)
        whole = self._logits(ids, DynamicCache(config=self.model.config))[:, first:]
        return {
            "tokens": tokens,
            "kv_is_equal": same,
            "logits_are_equal": torch.equal(without, again),
            "to_one_pass": (whole - again).abs().max().item(),
            "same_choices": (whole.argmax(-1) == again.argmax(-1)).float().mean().item(),
        }

    def attended(self, ids: list[int], block: int) -> dict[str, Any]:
        """What is selected of attention that the model paid, and of attention to one block and the sink alone."""
        with torch.no_grad():
            self.model.set_attn_implementation("eager")
            paid = self.model(torch.tensor([ids]), output_attentions=True).attentions
            self.model.set_attn_implementation("sdpa")
        made = torch.zeros(1, 4, 3, len(ids))
        made[..., :8] = 1.0
        made[..., block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = 0.01
        return {
            "paid": selection(paid, BLOCK_TOKENS),
            "reported": self._cached.report(ids, paid),
            "made": selection([made, made], BLOCK_TOKENS),
        }

    def refused(self, kind: str) -> str:
        """What is said where something cannot be stored."""
        try:
            if kind == "windows":
                self._cached.load([1, 2, 3], into=DynamicCache(config=self.model.config))
            elif kind == "batch":
                self._cached.load(torch.ones((2, 3), dtype=torch.long))
            elif kind == "image":
                self._cached.load([1, 2, 3, 5, 5, 5, 9])
            elif kind == "beams":
                cache = DynamicCache()
                with torch.no_grad():
                    self.model(torch.ones((2, 3), dtype=torch.long), past_key_values=cache)
                self._cached.store([1, 2, 3], cache)
            elif kind == "full":
                cache = DynamicCache()
                self._logits([1, 2, 3], cache)
                self._cached.load([1, 2, 3], into=cache)
        except Exception as error:  # noqa: BLE001 - what is asked for
            return f"{type(error).__name__}: {error}"
        return ""

    def statistics(self) -> dict[str, float]:
        return self._cached.statistics.totals()

    @property
    def _cached(self) -> KvstoredCache:
        assert self.connector is not None
        return self.connector

    def _logits(self, ids: list[int], cache: DynamicCache) -> torch.Tensor:
        with torch.no_grad():
            return self.model(torch.tensor([ids]), past_key_values=cache).logits

    def _generated(
        self, ids: list[int], tokens: int, cache: Any, began: float, loaded: int
    ) -> dict[str, Any]:
        first: list[float] = []

        def note(_ids: Any, scores: Any) -> Any:
            first.append(time.perf_counter() - began)
            return scores

        given = torch.tensor([ids])
        made = self.model.generate(
            given, cache=cache, max_new_tokens=tokens, do_sample=False, logits_processor=[note]
        )
        blocks = _block_hashes(cache, len(ids))
        return {"ids": made[0].tolist(), "loaded": loaded, "ttft_s": first[0], "blocks": blocks}


def _block_hashes(cache: Any, tokens: int) -> list[str]:
    """Of the keys and values of each full block, where the layers hold them all."""
    return [_block_hash(cache, i) for i in range(tokens // BLOCK_TOKENS)]


def _block_hash(cache: Any, index: int) -> str:
    hasher = hashlib.sha256()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            part = tensor[:, :, index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS]
            hasher.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def main() -> None:
    engine = None
    for line in sys.stdin:
        asked = json.loads(line)
        call = asked.pop("call")
        if call == "model":
            engine, told = Engine(**asked), True
        else:
            told = getattr(engine, call)(**asked)
        os.write(1, json.dumps(told).encode() + b"\n")


if __name__ == "__main__":
    main()
