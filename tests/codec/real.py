"""Real KV of SmolLM2-135M-Instruct, layer 20, one head: K and V of 256 tokens of this repository's docs, as bfloat16 bits [K or V, token, channel].

`a` and `b` are the same tokens after system prompts of equal length with another date and user. Made by `bench.codec_capture`.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HERE = Path(__file__).parent


def bits(variant: str) -> NDArray[np.uint16]:
    with np.load(HERE / "smollm2.npz") as loaded:
        kv: NDArray[np.uint16] = loaded[variant]
    return kv


def plain(variant: str) -> NDArray[np.uint8]:
    return bits(variant).reshape(-1).view(np.uint8)
