"""The forward pass of SmolLM2 (a small Llama) over a KV cache that is one numpy array."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from examples.smollm2.tokens import Tokenizer
from examples.smollm2.weights import Tensor, read_gguf

KV = NDArray[np.float16]
"""(layers, 2, heads, tokens, dim): K after RoPE, and V. Rounded to float16 when written, so that a stored cache is the cache."""


class Model:
    def __init__(self, path: Path) -> None:
        facts, tensors = read_gguf(path)
        self.tokenizer = Tokenizer(facts)
        self.layers = int(facts["llama.block_count"])
        self.heads = int(facts["llama.attention.head_count"])
        self.kv_heads = int(facts["llama.attention.head_count_kv"])
        self.dim = int(facts["llama.rope.dimension_count"])
        self.parameters = sum(tensor.size for tensor in tensors.values())
        self._epsilon = float(facts["llama.attention.layer_norm_rms_epsilon"])
        self._embedding = tensors["token_embd.weight"]
        self._norm = tensors["output_norm.weight"]
        self._weights = [_layer(tensors, i) for i in range(self.layers)]
        positions = np.arange(int(facts["llama.context_length"]))
        frequency = float(facts["llama.rope.freq_base"]) ** (-np.arange(0, self.dim, 2) / self.dim)
        self._turn = np.exp(1j * np.outer(positions, frequency)).astype(np.complex64)

    def new_cache(self, tokens: int) -> KV:
        return np.zeros((self.layers, 2, self.kv_heads, tokens, self.dim), np.float16)

    def forward(self, ids: list[int], kv: KV, start: int) -> Tensor:
        """Computes the tokens at `start`, whose prefix is in the cache, and adds them to it; logits of what follows the last."""
        end = start + len(ids)
        hidden = self._embedding[ids]
        for layer, weight in enumerate(self._weights):
            normed = self._normed(hidden, weight["attn_norm"])
            self._write(kv[layer], normed, weight, start)
            query = self._turned(normed @ weight["attn_q"], start)
            hidden = hidden + self._attention(query, kv[layer, :, :, :end]) @ weight["attn_output"]
            normed = self._normed(hidden, weight["ffn_norm"])
            gate = normed @ weight["ffn_gate"]
            gated = gate / (1 + np.exp(-gate)) * (normed @ weight["ffn_up"])
            hidden = hidden + gated @ weight["ffn_down"]
        logits: Tensor = self._embedding @ self._normed(hidden[-1], self._norm)
        return logits

    def _write(self, kv: KV, normed: Tensor, weight: dict[str, Tensor], start: int) -> None:
        end = start + len(normed)
        value = (normed @ weight["attn_v"]).reshape(len(normed), self.kv_heads, self.dim)
        kv[0, :, start:end] = self._turned(normed @ weight["attn_k"], start)
        kv[1, :, start:end] = value.transpose(1, 0, 2)

    def _attention(self, query: Tensor, kv: KV) -> Tensor:
        """Each KV head serves a few query heads, which are laid one after the other."""
        count, total = query.shape[1], kv.shape[2]
        key, value = kv.astype(np.float32)
        grouped = query.reshape(self.kv_heads, -1, self.dim)
        products = grouped @ key.transpose(0, 2, 1) / np.sqrt(np.float32(self.dim))
        seen = np.arange(total) <= np.arange(total - count, total)[:, None]
        scores = np.where(seen, products.reshape(self.heads, count, total), np.float32(-np.inf))
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = scores.reshape(self.kv_heads, -1, total) @ value
        flat: Tensor = (
            mixed.reshape(self.heads, count, self.dim).transpose(1, 0, 2).reshape(count, -1)
        )
        return flat

    def _turned(self, flat: Tensor, start: int) -> Tensor:
        """RoPE, on neighbouring pairs as GGUF lays them; (heads, tokens, dim)."""
        pairs = flat.reshape(len(flat), -1, self.dim).transpose(1, 0, 2).copy().view(np.complex64)
        turned: Tensor = (pairs * self._turn[start : start + len(flat)]).view(np.float32)
        return turned

    def _normed(self, hidden: Tensor, weight: Tensor) -> Tensor:
        mean: Tensor = np.mean(hidden * hidden, -1, keepdims=True)
        normed: Tensor = hidden / np.sqrt(mean + np.float32(self._epsilon)) * weight
        return normed


def _layer(tensors: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """By their short names; matrices as (inputs, outputs), so that `x @ w` reads them in order."""
    prefix = f"blk.{layer}."
    named = {
        name.removeprefix(prefix).removesuffix(".weight"): t
        for name, t in tensors.items()
        if name.startswith(prefix)
    }
    return {name: np.ascontiguousarray(tensor.T) for name, tensor in named.items()}
