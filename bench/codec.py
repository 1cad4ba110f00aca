"""Every mode of the codec on captured KV, beside its ceilings and the public tools: `python -m bench.codec FILE.npy... [--lossy]`.

CPU time, best of three passes, all modes of a file in one run. Captures: `bench.codec_capture`.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from kvstored.cli import codec_modes
from kvstored.cli.codec_modes import Subject
from kvstored.codec.elements import Element

BLOCK_TOKENS = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--lossy", action="store_true")
    parser.add_argument(
        "--fp8", action="store_true", help="the file's float32 values as e4m3 and e5m2"
    )
    asked = parser.parse_args()
    _ceilings()
    for path in asked.files:
        against = path.with_name(path.name.replace("_b", "_a"))
        for subject in _subjects(path, against if against != path else None, is_fp8=asked.fp8):
            modes = codec_modes.lossless_modes(subject) + codec_modes.other_modes(subject)
            modes += codec_modes.lossy_modes(subject) if asked.lossy else []
            print(
                f"\n{subject.name} {subject.element.name.lower()}: {len(subject.blocks)} blocks of {len(subject.blocks[0])} bytes"
            )
            for mode in modes:
                found = codec_modes.measure(mode, subject)
                error = f" rms {found.error.relative:.4f}" if found.error else ""
                print(
                    f"{found.mode:24} {found.ratio:7.3f}  {found.encode_rate / 1e9:5.2f} / {found.decode_rate / 1e9:5.2f} GB/s{error}  {found.note}"
                )


def _subjects(path: Path, against: Path | None, *, is_fp8: bool) -> list[Subject]:
    whole = [np.load(each) for each in (path, against) if each is not None and each.exists()]
    if is_fp8:
        from kvstored.codec.values import words_of_floats

        elements = (Element.F8E4M3, Element.F8E5M2)
        return [_cut(path, e, [words_of_floats(each, e) for each in whole]) for e in elements]
    return [_cut(path, codec_modes.checked_element("", whole[0]), whole)]


def _cut(path: Path, element: Element, whole: list[np.ndarray]) -> Subject:
    count = whole[0].shape[-2] // BLOCK_TOKENS
    numbers = sorted({1, count // 2, count - 1})
    cut = [
        tuple(
            np.ascontiguousarray(each[..., n * BLOCK_TOKENS : (n + 1) * BLOCK_TOKENS, :])
            .reshape(-1)
            .view(np.uint8)
            for n in numbers
        )
        for each in whole
    ]
    return Subject(path.name, element, BLOCK_TOKENS, whole[0].shape[-1], cut[0], tuple(cut[1:]))


def _ceilings() -> None:
    source = np.random.default_rng(1).integers(0, 256, 6 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    print(f"copy {_rate(lambda: np.copyto(target, source), len(source)):.1f} GB/s")
    print(f"xxh3 {_rate(lambda: xxhash.xxh3_64(source), len(source)):.1f} GB/s")


def _rate(work: Callable[[], object], size: int) -> float:
    seconds = []
    for _ in range(10):
        begun = time.thread_time()
        work()
        seconds.append(time.thread_time() - begun)
    return size / min(seconds) / 1e9


if __name__ == "__main__":
    main()
