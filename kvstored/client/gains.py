"""What a group of a namespace gains as frames, from a full block of it."""

import time
from dataclasses import dataclass

import numpy as np

from kvstored.client.copying import Bytes
from kvstored.codec import blocks, planner
from kvstored.codec.elements import element_of
from kvstored.codec.link import Gain
from kvstored.codec.plan import Plan
from kvstored.core.types import GroupKind, GroupSpec, NamespaceSpec

SAMPLES = 3
"""Of which the fastest counts: the first decode of a process is twenty times slower than the next, and any may be interrupted."""
LOOKS_AGAIN = 1024


@dataclass(slots=True)
class Known:
    plan: Plan
    gain: Gain
    left: int
    """Pieces until it is looked at again."""


def looked_at(spec: NamespaceSpec, group: GroupSpec, plain: Bytes) -> Known:
    is_blob = group.kind is GroupKind.STATE or (
        group.kind is GroupKind.WINDOW and not group.per_block
    )
    rows = 1 if is_blob else spec.block_tokens // group.ratio
    plan = planner.plan_for(plain, element_of(spec.dtype), rows)
    target = np.empty_like(plain)
    rates = []
    for _ in range(SAMPLES):
        begun_s = time.thread_time()
        packed = blocks.encode(plain, plan)
        encoded_s = time.thread_time()
        blocks.decode(packed, target)
        took_s = encoded_s - begun_s, time.thread_time() - encoded_s
        rates.append([plain.size / max(each_s, 1e-6) for each_s in took_s])
    gain = Gain(plain.size / packed.size, *np.max(rates, axis=0).tolist())
    return Known(plan, gain, LOOKS_AGAIN)
