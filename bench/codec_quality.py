"""What lossy modes do to the next token, and what P frames save where the system prompt changes: `python -m bench.codec_quality`.

SmolLM2-135M-Instruct as `bench.codec_capture` runs it. Quality: 1,792 tokens of KV are coded and decoded, the next 256 tokens are
teacher-forced on them; KL of the next-token distributions and share of equal first choices against the same pass on exact KV.
Replay: one document behind prompts with other dates and users.
"""

from itertools import product

import numpy as np

from bench.codec_capture import SYSTEM, Model, bits_of, model_path, texts, to_bf16, tokenizer_of
from kvstored.cli import codec_modes
from kvstored.cli.codec_modes import Subject
from kvstored.codec import blocks, planner
from kvstored.codec.blocks import Known
from kvstored.codec.elements import Element
from kvstored.codec.planner import Goal

BLOCK_TOKENS = 256
PREFIX, SCORED = 1792, 256
DATES = ("Monday, 3 March 2025", "Friday, 8 August 2025", "Tuesday, 2 January 2025")
USERS = ("Alice Becker", "Bruno Keller")


def main() -> None:
    path = model_path()
    model, tokenizer = Model(path, to_bf16), tokenizer_of(path)
    for name, text in texts().items():
        body = tokenizer.encode(text, add_special_tokens=False).ids
        heads = [
            tokenizer.encode(SYSTEM.format(date=date, user=user), add_special_tokens=False).ids
            for date, user in product(DATES, USERS)
        ]
        heads = [head for head in heads if len(head) == len(heads[0])]
        runs = [np.asarray((head + body)[: PREFIX + SCORED]) for head in heads]
        captured = [bits_of(model.run(ids)[0]) for ids in runs]
        _replay(name, captured)
        _quality(name, model, runs[1], captured[1], captured[0])


def _cut(kv: np.ndarray, number: int) -> np.ndarray:
    part = kv[..., number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS, :]
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def _replay(name: str, captured: list[np.ndarray]) -> None:
    """The first request's blocks are I frames; the others' have the same content keys from the second block on."""
    numbers = range(1, captured[0].shape[-2] // BLOCK_TOKENS)
    for goal in Goal:
        plain = first = alone = against = 0
        plan = planner.plan_for(_cut(captured[0], 1), Element.BF16, BLOCK_TOKENS, goal=goal)
        for number in numbers:
            reference = _cut(captured[0], number)
            known: Known = blocks.known(b"content key", reference)
            first += len(blocks.encode(reference, plan))
            for kv in captured[1:]:
                block = _cut(kv, number)
                assert planner.is_near(block, reference, plan)
                coded = blocks.encode(block, plan, [known])
                decoded = np.empty_like(block)
                blocks.decode(coded, decoded, [known])
                assert np.array_equal(decoded, block)
                plain += len(block)
                alone += len(blocks.encode(block, plan))
                against += len(coded)
        print(
            f"replay {name}, {len(captured)} prompts, plan {goal.name.lower()}: of the repeated part raw/P {plain / against:.2f}, "
            f"lossless I/P {alone / against:.2f}; all of it raw/(I+P) {(plain + plain / (len(captured) - 1)) / (first + against):.2f}"
        )


def _quality(name: str, model: Model, ids: np.ndarray, bits: np.ndarray, other: np.ndarray) -> None:
    exact = _floats(bits)
    reference = _log_probabilities(model, ids, exact)
    prefix = [kv[..., :PREFIX, :] for kv in (bits, other)]
    numbers = range(PREFIX // BLOCK_TOKENS)
    cut = [tuple(_cut(kv, n) for n in numbers) for kv in prefix]
    subject = Subject(name, Element.BF16, BLOCK_TOKENS, bits.shape[-1], cut[0], (cut[1],))
    for mode in codec_modes.lossy_modes(subject):
        decoded, stored = exact.copy(), 0
        for n in numbers:
            coded, target = mode.encode(n), np.empty_like(cut[0][n])
            stored += len(coded)
            mode.decode(n, coded, target)
            shape = (*bits.shape[:3], BLOCK_TOKENS, bits.shape[-1])
            part = target.view("<u2").reshape(shape)
            decoded[..., n * BLOCK_TOKENS : (n + 1) * BLOCK_TOKENS, :] = _floats(part)
        found = _log_probabilities(model, ids, decoded)
        divergence = float(np.mean(np.sum(np.exp(reference) * (reference - found), axis=1)))
        same = float(np.mean(found.argmax(axis=1) == reference.argmax(axis=1)))
        target_ids = ids[PREFIX + 1 :]
        rows = np.arange(len(target_ids))
        worse = float(np.exp(np.mean(reference[rows, target_ids] - found[rows, target_ids])) - 1)
        ratio = sum(map(len, cut[0])) / stored
        print(
            f"{name} {mode.name:22} {ratio:6.2f}x KL {divergence:.2e} top-1 {same:.3f} ppl {worse:+.2%}",
            flush=True,
        )


def _floats(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _log_probabilities(model: Model, ids: np.ndarray, kv: np.ndarray) -> np.ndarray:
    _, hidden = model.run(ids, kv=kv, past=PREFIX)
    logits = model.logits(hidden).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    result: np.ndarray = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return result


if __name__ == "__main__":
    main()
