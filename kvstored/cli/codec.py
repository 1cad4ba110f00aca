"""`kvstored codec bench`: what each codec makes of one's own KV tensors. Needs no daemon."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table

from kvstored import units
from kvstored.cli import codec_modes
from kvstored.cli.codec_modes import Measured, Subject
from kvstored.cli.output import Json, facts, json_option, progress, show, table
from kvstored.codec.planner import GAIN_MIN
from kvstored.errors import InvalidArgument

Array = NDArray[Any]  # of whatever the file has
_SMALL_GAIN = 1.02
"""`small` is advised where it saves more than 2 % beyond `fast`."""


@click.group(no_args_is_help=True)
def codec() -> None:
    """Measure how blocks can be stored in fewer bytes."""


@codec.command()
@click.argument(
    "files",
    nargs=-1,
    required=True,
    metavar="FILE.npy...",
    type=click.Path(dir_okay=False, path_type=Path),
)
@click.option(
    "--dtype",
    default="",
    help="Of the elements, as engines name it; by default the file's, and bfloat16 for 16-bit integers.",
)
@click.option(
    "--block-tokens",
    metavar="N",
    type=click.IntRange(1, 65536),
    default=256,
    show_default=True,
    help="Tokens of a block.",
)
@click.option(
    "--token-axis",
    metavar="AXIS",
    type=int,
    default=-2,
    show_default=True,
    help="Of the array; the axes behind it are a token's channels.",
)
@click.option(
    "--blocks",
    "blocks_max",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=3,
    show_default=True,
    help="Blocks of each file, evenly spread.",
)
@click.option(
    "--against",
    "others",
    metavar="FILE.npy",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The same tokens after another prefix, for P frames; twice for B frames. Only with one FILE.",
)
@click.option("--lossy", "is_lossy", is_flag=True, help="Also the lossy modes, with their errors.")
@click.option("--advise", "is_advised", is_flag=True, help="Only the setting to use, and why.")
@click.option(
    "--plot",
    "plot_path",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw ratio and decoding rate of every mode.",
)
@json_option
def bench(
    *,
    files: tuple[Path, ...],
    dtype: str,
    block_tokens: int,
    token_axis: int,
    blocks_max: int,
    others: tuple[Path, ...],
    is_lossy: bool,
    is_advised: bool,
    plot_path: Path | None,
    is_json: bool,
) -> None:
    """Code blocks of FILE.npy every way there is, ours and zstd, ZipNN and blosc2 where they are installed, and decode and compare them.

    Rates are bytes of CPU time, whatever the threads, the best of three passes. Ratios are over the bytes of the file's own dtype.
    """  # fmt: skip
    if others and (len(files) > 1 or len(others) > 2):
        raise InvalidArgument(
            f"--against takes one or two files for one FILE: files={len(files)} against={len(others)}"
        )
    subjects = [
        _subject(path, others, dtype, block_tokens, token_axis, blocks_max) for path in files
    ]
    results: list[tuple[Subject, list[Measured]]] = []
    for subject in subjects:
        modes = codec_modes.lossless_modes(subject)
        if is_advised:
            modes = [
                mode for mode in modes if mode.name.startswith("plan") or mode.name == "P frame"
            ]
        else:
            modes += codec_modes.other_modes(subject)
            modes += codec_modes.lossy_modes(subject) if is_lossy else []
        with progress(subject.name, len(modes), is_quiet=is_json) as advance:
            measured: list[Measured] = []
            for mode in modes:
                measured.append(codec_modes.measure(mode, subject))
                advance(1)
        results.append((subject, measured))
    advice = _advice(results)
    if plot_path is not None:
        _plot(results, plot_path)
    value: Json = {"files": [_as_json(*each) for each in results], "advice": advice}
    show(value, lambda: _text(results, advice, is_advised=is_advised), is_json=is_json)


def _subject(
    path: Path,
    others: Sequence[Path],
    dtype: str,
    block_tokens: int,
    token_axis: int,
    blocks_max: int,
) -> Subject:
    array = _loaded(path)
    element = codec_modes.checked_element(dtype, array)
    axis = token_axis % array.ndim if -array.ndim <= token_axis < array.ndim else -1
    if axis < 0 or axis == array.ndim - 1 or array.shape[axis] < block_tokens:
        raise InvalidArgument(
            f"file has no block along this axis: path={path} shape={array.shape} {token_axis=} {block_tokens=}"
        )
    against = [_loaded(other) for other in others]
    if any(other.shape != array.shape or other.dtype != array.dtype for other in against):
        raise InvalidArgument(f"files differ in shape or dtype: shape={array.shape}")
    count = array.shape[axis] // block_tokens
    # the first block is hardly like the others, so it is not among them where there are enough
    chosen = sorted({count * (2 * i + 1) // (2 * blocks_max) for i in range(blocks_max)})
    columns = int(np.prod(array.shape[axis + 1 :]))

    def cut(whole: Array, number: int) -> NDArray[np.uint8]:
        part = np.take(whole, range(number * block_tokens, (number + 1) * block_tokens), axis=axis)
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8)

    return Subject(
        path.name,
        element,
        block_tokens,
        columns,
        tuple(cut(array, number) for number in chosen),
        tuple(tuple(cut(other, number) for number in chosen) for other in against),
    )


def _loaded(path: Path) -> Array:
    try:
        loaded: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot be read as .npy: path={path} cause={error}") from error
    if loaded.ndim < 2 or not loaded.size:
        raise InvalidArgument(
            f"array needs a token and a channel axis: path={path} shape={loaded.shape}"
        )
    return loaded


def _advice(results: Sequence[tuple[Subject, list[Measured]]]) -> dict[str, str]:
    """The setting, and the figures behind it; the worst of the files decides, since the setting is one for all."""
    named = [{mode.mode: mode for mode in measured} for _, measured in results]
    fast = min(each["plan fast"].ratio for each in named)
    small = min(each["plan small"].ratio for each in named)
    decode = min(each["plan small"].decode_rate for each in named)
    if small < 1 + GAIN_MIN:
        return {"disk.codec": "raw", "why": f"at most {small:.3f}x is gained"}
    figures = f"fast {fast:.3f}x, small {small:.3f}x, decoded at {units.format_rate(decode)} a core"
    if small > fast * _SMALL_GAIN:
        return {"disk.codec": "small", "why": f"{figures}; take fast where loads must not cost CPU"}
    return {"disk.codec": "fast", "why": figures}


def _as_json(subject: Subject, measured: Sequence[Measured]) -> Json:
    return {
        "file": subject.name,
        "dtype": subject.element.name.lower(),
        "block_bytes": len(subject.blocks[0]),
        "blocks": len(subject.blocks),
        "modes": [asdict(each) for each in measured],
    }


def _text(
    results: Sequence[tuple[Subject, list[Measured]]], advice: dict[str, str], *, is_advised: bool
) -> RenderableType:
    parts: list[RenderableType] = []
    for subject, measured in results if not is_advised else ():
        size = units.format_about(len(subject.blocks[0]))
        head = f"{subject.name}: {subject.element.name.lower()}, {len(subject.blocks)} blocks of {size}"
        parts += [head, _table(measured), ""]
    return Group(*parts, facts(advice))


def _table(measured: Sequence[Measured]) -> Table:
    is_lossy = any(each.error is not None for each in measured)
    errors = ("rms error >", "largest >", "cosine >") if is_lossy else ()
    made = table("mode", "ratio >", "encode GB/s >", "decode GB/s >", *errors, "plan")
    for each in measured:
        cells = [each.mode, f"{each.ratio:.3f}"]
        cells += [f"{rate / 1e9:.2f}" for rate in (each.encode_rate, each.decode_rate)]
        if is_lossy and each.error is not None:
            cells += [
                f"{each.error.relative:.4f}",
                f"{each.error.largest:.3g}",
                f"{each.error.cosine:.5f}",
            ]
        elif is_lossy:
            cells += ["0", "0", "1"]
        made.add_row(*cells, each.note)
    return made


def _plot(results: Sequence[tuple[Subject, list[Measured]]], path: Path) -> None:
    """One panel a file; the suffix of `path` says the format."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidArgument("a plot needs matplotlib: pip install 'kvstored[plot]'") from error
    figure = Figure(figsize=(8, 5 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for panel, (subject, measured) in zip(panels, results, strict=True):
        for each in measured:
            rate = each.decode_rate / 1e9
            panel.scatter(
                each.ratio,
                rate,
                marker="o" if each.error is None else "x",
                color="C0" if each.error is None else "C1",
            )
            panel.annotate(
                each.mode, (each.ratio, rate), fontsize=7, xytext=(3, 3), textcoords="offset points"
            )
        panel.set(
            xlabel="plain bytes per stored byte", ylabel="decode, GB/s a core", title=subject.name
        )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot draw the plot path={path}: {error}") from error


COMMANDS = (codec,)
