"""The codec on KV of a model that Transformers runs: ratios, P frames, and what lossy modes do to the next token: `python -m bench.codec_transformers FOLDER`.

FOLDER has a model as Transformers loads it, or a GGUF file (`--gguf NAME`). Needs torch and transformers beside this package. The texts, the lengths and
the measures are those of `bench.codec_quality`; here the model is Transformers' own, in bfloat16.
"""

import argparse
from pathlib import Path

import numpy as np

from bench.codec_capture import SYSTEM, texts
from kvstored.cli import codec_modes
from kvstored.cli.codec_modes import Subject
from kvstored.codec.elements import Element

BLOCK_TOKENS = 256
PREFIX, SCORED = 1792, 256
HEADS = (("Monday, 3 March 2025", "Alice Becker"), ("Friday, 8 August 2025", "Bruno Keller"))
Bits = np.ndarray


class Engine:
    def __init__(self, folder: Path, gguf: str | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.manual_seed(0)
        extra = {"gguf_file": gguf} if gguf else {}
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder, **extra)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **extra)
        self.model.eval()

    def captured(self, ids: list[int]) -> Bits:
        """[layer, K or V, head, token, channel], all tokens of every layer."""
        from transformers import DynamicCache

        cache = DynamicCache()  # without a config it keeps what lies before a window, too
        with self.torch.no_grad():
            self.model(self.torch.tensor([ids]), past_key_values=cache, use_cache=True)
        layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        return np.stack([np.stack([self._bits(part) for part in both]) for both in layers])

    def log_probabilities(self, bits: Bits, ids: list[int]) -> np.ndarray:
        """Of the token after each of `ids`, which follow the tokens of `bits`."""
        from transformers import DynamicCache

        cache = DynamicCache()
        for i, (keys, values) in enumerate(bits):
            cache.update(self._tensor(keys), self._tensor(values), i)
        with self.torch.no_grad():
            answer = self.model(self.torch.tensor([ids]), past_key_values=cache, use_cache=True)
        return self.torch.log_softmax(answer.logits[0].double(), dim=-1).numpy()

    def _bits(self, tensor: object) -> Bits:
        words = tensor.contiguous().view(self.torch.int16).numpy()
        return words.view(np.uint16)

    def _tensor(self, bits: Bits) -> object:
        words = self.torch.from_numpy(np.ascontiguousarray(bits).view(np.int16))
        return words.view(self.torch.bfloat16)[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", default=None)
    asked = parser.parse_args()
    engine = Engine(asked.folder, asked.gguf)
    for name, text in texts().items():
        body = engine.tokenizer(text, add_special_tokens=False).input_ids
        heads = [
            engine.tokenizer(SYSTEM.format(date=date, user=user)).input_ids for date, user in HEADS
        ]
        assert len(heads[0]) == len(heads[1]), "prompts of one length"
        ids = [(head + body)[: PREFIX + SCORED] for head in heads]
        one, other = (engine.captured(each) for each in ids)
        print(f"{name}: KV {one.shape}", flush=True)
        subject = _subject(name, other, one)
        for mode in codec_modes.lossless_modes(subject):
            found = codec_modes.measure(mode, subject)
            rates = f"{found.encode_rate / 1e9:.2f} / {found.decode_rate / 1e9:.2f} GB/s"
            print(f"{name} {mode.name:22} {found.ratio:6.3f}x {rates}  {found.note}", flush=True)
        _quality(name, engine, ids[1], other, one)


def _subject(name: str, kv: Bits, against: Bits) -> Subject:
    """Without the first block, which names date and user, and behind which the same tokens begin."""
    cut = [tuple(_cut(each, n) for n in range(1, PREFIX // BLOCK_TOKENS)) for each in (kv, against)]
    return Subject(name, Element.BF16, BLOCK_TOKENS, kv.shape[-1], cut[0], (cut[1],))


def _cut(kv: Bits, number: int) -> np.ndarray:
    part = kv[..., number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS, :]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def _quality(name: str, engine: Engine, ids: list[int], kv: Bits, other: Bits) -> None:
    numbers = range(PREFIX // BLOCK_TOKENS)
    blocks = [tuple(_cut(each, n) for n in numbers) for each in (kv, other)]
    subject = Subject(name, Element.BF16, BLOCK_TOKENS, kv.shape[-1], blocks[0], (blocks[1],))
    prefix, scored = kv[..., :PREFIX, :], ids[PREFIX:]
    reference = engine.log_probabilities(prefix, scored)
    for mode in codec_modes.lossy_modes(subject):
        decoded, stored = np.empty_like(prefix), 0
        for n in numbers:
            coded, target = mode.encode(n), np.empty_like(blocks[0][n])
            stored += len(coded)
            mode.decode(n, coded, target)
            part = target.view("<u2").reshape(*kv.shape[:3], BLOCK_TOKENS, kv.shape[-1])
            decoded[..., n * BLOCK_TOKENS : (n + 1) * BLOCK_TOKENS, :] = part
        found = engine.log_probabilities(decoded, scored)
        divergence = float(np.mean(np.sum(np.exp(reference) * (reference - found), axis=1)))
        same = float(np.mean(found.argmax(axis=1) == reference.argmax(axis=1)))
        rows, told = np.arange(len(scored) - 1), np.asarray(scored[1:])
        worse = float(np.exp(np.mean(reference[rows, told] - found[rows, told])) - 1)
        ratio = sum(map(len, blocks[0])) / stored
        print(
            f"{name} {mode.name:22} {ratio:6.2f}x KL {divergence:.2e} top-1 {same:.3f} ppl {worse:+.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
