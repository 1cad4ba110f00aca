"""What a group gains as frames is looked at by samples, of which one may be slow, and looked at again."""

import itertools
import time

import numpy as np
import pytest

from kvstored.client import framing, gains
from kvstored.client.framing import Framing
from kvstored.client.gains import SAMPLES, looked_at

from .test_frames import BLOCK_BYTES, SPEC, Bytes, rows_of


def block() -> Bytes:
    kv = rows_of(1)[0][0]
    assert kv is not None
    return kv


def test_the_fastest_sample_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # seconds of CPU: begun, encoded, decoded
    read_s = iter([0.0, 1.0, 21.0, 30.0, 30.5, 32.5, 40.0, 47.0, 50.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(read_s))
    known = looked_at(SPEC, SPEC.groups[0], block())
    assert next(read_s, None) is None, f"of {SAMPLES} samples all were read"
    assert known.gain.encode_bytes_per_s == pytest.approx(BLOCK_BYTES / 0.5)
    assert known.gain.decode_bytes_per_s == pytest.approx(BLOCK_BYTES / 2)
    assert known.gain.ratio > 1.4
    assert not known.plan.is_raw


def test_what_did_not_gain_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count(1)

    def counted(*of: object) -> gains.Known:
        next(looks)
        return looked_at(*of)  # type: ignore[arg-type]

    monkeypatch.setattr(gains, "LOOKS_AGAIN", 3)
    monkeypatch.setattr(framing, "looked_at", counted)
    made = Framing(always=True)
    made.learn(b"d", SPEC)

    def pays(plain: Bytes) -> bool:
        return made.pays(b"d", [(0, (plain,))], link_bytes_per_s=0, decoders=1)

    noise = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, dtype=np.uint8)
    assert [pays(noise), *(pays(block()) for _ in range(4))] == [False, False, False, False, True]
    assert next(looks) == 3
