"""Statistics of selection logs, against figures by hand; the log that the daemon writes is of the committed schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstored.composition import feedback_limits
from kvstored.config import load
from kvstored.core.feedback import Access
from kvstored.core.keys import key_batch
from kvstored.core.namespace import Namespaces
from kvstored.core.types import KeyBatch
from kvstored.errors import ConfigError, InvalidArgument
from kvstored.model.selection import (
    WEIGHT_MIN,
    StreamStats,
    load_weights,
    runs_of,
    stats_of,
    weights_text,
)
from kvstored.store.selection_log import BUFFER_LINES_MAX, SelectionLog
from tests.core.desk import LINEAR, SPARSE, spec_of

ROOT = Path(__file__).parents[2]
LAYOUT = Namespaces().open(spec_of("m", LINEAR, SPARSE), supersede=False).layout


def keys_of(count: int) -> KeyBatch:
    packed = b"".join(i.to_bytes(8, "big") for i in range(1, count + 1))
    return key_batch(packed, 8, LAYOUT.seed)


def lines_of(
    selected: NDArray[np.bool_], tmp_path: Path, *, layer: int = -1, a_report: int = 4
) -> list[str]:
    """As the daemon writes them."""
    log = SelectionLog(tmp_path / "log")
    keys = keys_of(selected.shape[1])
    for begin in range(0, len(selected), a_report):
        part = selected[begin : begin + a_report]
        log.add(LAYOUT, keys, Access(1, layer, part, None), 100.0 + begin)
    log.write(log.take())
    return (tmp_path / "log").read_text().splitlines()


def stats(selected: NDArray[np.bool_], tmp_path: Path) -> StreamStats:
    (found,) = stats_of(runs_of(lines_of(selected, tmp_path)))
    return found


def test_figures_of_a_small_log_by_hand(tmp_path: Path) -> None:
    selected = np.zeros((8, 11), dtype=np.bool_)
    selected[:, 0] = True
    selected[::2, 1] = True
    found = stats(selected, tmp_path)
    assert (found.group, found.layer, found.steps, found.blocks) == ("csa", -1, 8, 11)
    assert found.frequency == pytest.approx(12 / 88)
    assert found.always == pytest.approx(1 / 11)
    assert found.never == pytest.approx(9 / 11)
    assert found.stability == pytest.approx(7 / 14)
    assert found.reuse[1] == pytest.approx(7 / 11)
    assert found.reuse[4] == pytest.approx(6 / 6)
    assert set(found.reuse) == {1, 4}
    assert found.gap_p95 == 2


def test_a_steady_selection_weighs_much_and_a_random_one_little(tmp_path: Path) -> None:
    steady = np.zeros((64, 100), dtype=np.bool_)
    steady[:, :10] = True
    assert stats(steady, tmp_path).weight == pytest.approx(1.0)
    (tmp_path / "log").unlink()
    noise = np.random.default_rng(1).random((64, 1000)) < 0.1
    assert stats(noise, tmp_path).weight == WEIGHT_MIN


def test_layers_have_weights_of_their_own_that_come_back(tmp_path: Path) -> None:
    steady = np.tile(np.arange(50) < 5, (32, 1))
    lines = lines_of(steady, tmp_path, layer=3)
    lines += lines_of(np.random.default_rng(2).random((32, 50)) < 0.1, tmp_path, layer=4)
    found = stats_of(runs_of(dict.fromkeys(lines)))
    assert [(each.group, each.layer) for each in found] == [("csa", 3), ("csa", 4)]
    file = tmp_path / "weights.json"
    file.write_text(weights_text(found))
    weights = load_weights(file)
    assert weights["csa", 3] > 0.9
    assert weights["csa", 4] < 0.3


def test_a_pause_is_no_step(tmp_path: Path) -> None:
    lines = lines_of(np.ones((4, 3), dtype=np.bool_), tmp_path)
    later = json.loads(lines[0]) | {"at_s": 1000.0}
    assert len(runs_of([*lines, json.dumps(later)])) == 2


def test_mass_is_read_too(tmp_path: Path) -> None:
    log = SelectionLog(tmp_path / "log")
    log.add(LAYOUT, keys_of(4), Access(1, 0, None, np.asarray([0.7, 0.29, 0.01, 0.0])), 1.0)
    (run,) = runs_of(log.take())
    assert run.selected.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize(
    "line",
    ["nonsense", "{}", "[]", '{"version": 1}', '{"version": 2, "count": 1}'],
)
def test_what_is_no_line_of_a_log_is_refused_with_its_number(line: str, tmp_path: Path) -> None:
    good = lines_of(np.ones((1, 2), dtype=np.bool_), tmp_path)
    with pytest.raises(InvalidArgument, match="line=2"):
        runs_of([*good, line])


@pytest.mark.parametrize("field", ["count", "blocks", "steps", "selected"])
def test_a_line_whose_lengths_do_not_agree_is_refused(field: str, tmp_path: Path) -> None:
    (line,) = lines_of(np.ones((2, 20), dtype=np.bool_), tmp_path)
    wrong: dict[str, Any] = {"count": 3, "blocks": "AAAA", "steps": 7, "selected": "AA=="}
    with pytest.raises(InvalidArgument):
        runs_of([json.dumps(json.loads(line) | {field: wrong[field]})])


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 2, "weights": []}', '{"version": 1, "weights": [{"group": 1}]}']
)
def test_weights_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_text(text)
    with pytest.raises(InvalidArgument):
        load_weights(tmp_path / "w")
    settings = {"feedback.weights": str(tmp_path / "w")}
    with pytest.raises(ConfigError, match=r"feedback\.weights"):
        feedback_limits(load(flags=settings, environ={}).config)


def test_lines_have_the_fields_of_the_committed_schema(tmp_path: Path) -> None:
    schema = json.loads((ROOT / "proto/kvstored/v1/selection-log.schema.json").read_text())
    log = SelectionLog(tmp_path / "log")
    log.add(LAYOUT, keys_of(2), Access(1, 5, np.ones((3, 2), dtype=np.bool_), None), 1.0)
    log.add(LAYOUT, keys_of(2), Access(0, -1, None, np.ones(2)), 1.0)
    kinds = {"integer": int, "number": (int, float), "string": str, "array": list}
    for line, own in zip(map(json.loads, log.take()), schema["oneOf"], strict=True):
        assert set(schema["required"]) | set(own["required"]) <= set(line)
        assert set(line) <= set(schema["properties"])
        for name, value in line.items():
            says = schema["properties"][name]
            assert (
                value == says["const"]
                if "const" in says
                else isinstance(value, kinds[says["type"]])
            )


def test_the_buffer_and_the_file_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstored.store.selection_log.FILE_BYTES_MAX", 1000)
    log = SelectionLog(tmp_path / "log")
    access = Access(1, -1, np.ones((1, 8), dtype=np.bool_), None)
    for _ in range(BUFFER_LINES_MAX + 3):
        log.add(LAYOUT, keys_of(8), access, 1.0)
    lines = log.take()
    assert (len(lines), log.left_out) == (BUFFER_LINES_MAX, 3)
    for _ in range(3):
        log.write(lines[:10])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]
