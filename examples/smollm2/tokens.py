"""Text to token ids and back: byte-level BPE as the model's file describes it, and the chat format it was trained on."""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

_WORD = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_DIGIT = re.compile(r"(\d)")  # every digit is a token of its own
_SPECIAL = re.compile(r"(<\|im_start\|>|<\|im_end\|>)")
END = "<|im_end|>"


def _letters() -> dict[int, str]:
    """How byte-level BPE writes each of the 256 bytes as one visible letter."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + i) for i, byte in enumerate(hidden)
    }


_LETTER = _letters()
_BYTE = {letter: byte for byte, letter in _LETTER.items()}


class Tokenizer:
    def __init__(self, facts: dict[str, Any]) -> None:  # Any: as read from the file
        self._pieces: list[str] = facts["tokenizer.ggml.tokens"]
        self._ids = {piece: i for i, piece in enumerate(self._pieces)}
        merges = (tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"])
        self._rank = {merge: rank for rank, merge in enumerate(merges)}
        self._merged = lru_cache(maxsize=100_000)(self._merge)
        self.end = self._ids[END]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _SPECIAL.split(text):
            if _SPECIAL.fullmatch(part):
                ids.append(self._ids[part])
                continue
            for run in _DIGIT.split(part):
                for word in _WORD.findall(run):
                    ids.extend(self._merged(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        written = "".join(self._pieces[i] for i in ids)
        return bytes(_BYTE[letter] for letter in written if letter in _BYTE).decode(
            errors="replace"
        )

    def _merge(self, word: str) -> tuple[int, ...]:
        """Joins the neighbours of the lowest rank until none has one."""
        parts = [_LETTER[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self._rank.get(pair, len(self._rank)) for pair in pairwise(parts)]
            at = min(range(len(ranks)), key=ranks.__getitem__)
            if ranks[at] == len(self._rank):
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return tuple(self._ids[part] for part in parts)


def chat(system: str, user: str) -> str:
    """One question as the model was trained to be asked. What changes from call to call stands last, so that the prefix is shared."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
