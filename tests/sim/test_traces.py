"""The trace readers: what they read, and that everything malformed is refused with its line."""

import gzip
from pathlib import Path

import pytest

from kvstored.errors import InvalidArgument
from kvstored.sim.traces import Format, open_trace

FIXTURES = Path(__file__).parent / "fixtures"
MOONCAKE_ROW = '{"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": [0]}\n'
KVT1_HEAD = '#kvt1 {"name": "tiny", "block_tokens": 16}\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_mooncake_rows_are_read_with_their_ids_and_times() -> None:
    trace = open_trace(FIXTURES / "tiny.jsonl")
    assert (trace.format, trace.name, trace.block_tokens) == (Format.MOONCAKE, "tiny", 512)
    requests = list(trace)
    assert [r.block_ids.tolist() for r in requests] == [[0, 1, 2], [0, 1, 3], [0, 1, 2, 4], []]
    assert [r.ts_s for r in requests] == [0.0, 0.25, 1.5, 2.0]
    assert [r.input_tokens for r in requests] == [1300, 1400, 2000, 0]
    assert [r.output_tokens for r in requests] == [10, 20, 30, 0]


def test_kvt1_rows_share_the_blocks_they_keep_and_nothing_else() -> None:
    trace = open_trace(FIXTURES / "tiny.kvt")
    assert (trace.format, trace.name, trace.block_tokens) == (Format.KVT1, "tiny", 16)
    requests = list(trace)
    assert [r.block_ids.tolist() for r in requests] == [
        [0, 1, 2],
        [0, 1, 3, 4],
        [0, 1, 3, 5],
        [0],
        [6, 7],
        [0, 1, 3, 5, 8],
    ]
    assert [r.tag for r in requests] == ["a", "a", "a", "b,c", "", "a"]


@pytest.mark.parametrize("name", ["tiny.jsonl", "tiny.kvt"])
def test_a_gzipped_trace_reads_like_the_plain_one(tmp_path: Path, name: str) -> None:
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress((FIXTURES / name).read_bytes()))
    plain, trace = open_trace(FIXTURES / name), open_trace(packed)
    assert (trace.format, trace.name) == (plain.format, plain.name)
    assert [r.block_ids.tolist() for r in trace] == [r.block_ids.tolist() for r in plain]


def test_a_trace_can_be_iterated_again() -> None:
    trace = open_trace(FIXTURES / "tiny.kvt")
    assert [r.ts_s for r in trace] == [r.ts_s for r in trace]


@pytest.mark.parametrize(
    "row",
    [
        "{",
        "[1]",
        '{"timestamp": 5}',
        '{"timestamp": "5", "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": true, "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 5, "input_length": -1, "output_length": 1, "hash_ids": []}',
        '{"timestamp": 5, "input_length": 1, "output_length": 1.5, "hash_ids": []}',
        '{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": "0"}',
        '{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [0, true]}',
        '{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [0, 1, 0]}',
        '{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [-1]}',
        '{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": [9223372036854775808]}',
        '{"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": []}',
        "[" * 100_000,
    ],
)
def test_a_malformed_mooncake_row_is_refused_with_its_line(tmp_path: Path, row: str) -> None:
    path = written(tmp_path, MOONCAKE_ROW + "\n" + row + "\n")
    with pytest.raises(InvalidArgument, match="line=3"):
        list(open_trace(path))


@pytest.mark.parametrize(
    "row",
    [
        "1,2,3",
        "x,1,1,-1,0,1,a",
        "1,1,1,-1,0,1.5,a",
        "1,1,1,-2,0,1,a",
        "1,1,1,1,0,1,a",
        "1,1,1,0,4,1,a",
        "1,1,1,-1,1,1,a",
        "1,1,1,0,-1,1,a",
        "1,1,1,0,1,-1,a",
        "-1,1,1,-1,0,1,a",
        "1,1,1,-1,0,9999999999,a",
        "1,1,1,-1,0,99999999999999999999999,a",
        "1,1,1,-1,0,1,\udcff",
    ],
)
def test_a_malformed_kvt1_row_is_refused_with_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes((KVT1_HEAD + "0,1,1,-1,0,3,a\n" + row).encode(errors="surrogateescape"))
    with pytest.raises(InvalidArgument, match="line=3"):
        list(open_trace(path))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello\n",
        "#kvt1\n",
        "#kvt1 []\n",
        '#kvt1 {"name": "x"}\n',
        '#kvt1 {"name": 3, "block_tokens": 16}\n',
        '#kvt1 {"name": "x", "block_tokens": 0}\n',
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument, match="line=1"):
        open_trace(written(tmp_path, text))


def test_a_missing_file_is_an_invalid_argument(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read the trace"):
        open_trace(tmp_path / "none")


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage: str) -> None:
    packed = bytearray(gzip.compress(MOONCAKE_ROW.encode() * 1000))
    if damage == "cut":
        del packed[-20:]
    else:
        packed[-6] ^= 1
    path = tmp_path / "trace.gz"
    path.write_bytes(packed)
    with pytest.raises(InvalidArgument, match="damaged gzip"):
        list(open_trace(path))
