import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from kvstored import logs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def test_a_line_is_one_json_object_with_its_fields() -> None:
    stream = io.StringIO()
    logs.configure("info", is_json=True, stream=stream)
    logs.get("store").info("copy failed", tier="nvme", size_bytes=7)
    line = json.loads(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "copy failed",
        "level": "info",
        "logger": "kvstored.store",
        "tier": "nvme",
        "size_bytes": 7,
    }


def test_lines_below_the_level_are_dropped() -> None:
    stream = io.StringIO()
    logs.configure("warning", is_json=True, stream=stream)
    logs.get("store").info("no")
    logging.getLogger("grpc").info("no")
    assert stream.getvalue() == ""


def test_standard_logging_takes_the_same_way_with_its_traceback() -> None:
    stream = io.StringIO()
    logs.configure("info", is_json=True, stream=stream)
    try:
        raise ValueError("the cause")
    except ValueError:
        logging.getLogger("asyncio").exception("task failed: %s", "name")
    line = json.loads(stream.getvalue())
    assert line["event"] == "task failed: name"
    assert line["level"] == "error"
    assert "ValueError: the cause" in line["exception"]


def test_the_console_form_is_for_people() -> None:
    stream = io.StringIO()
    logs.configure("info", is_json=False, stream=stream)
    logs.get("store").info("copy failed", tier="nvme")
    assert "copy failed" in stream.getvalue()
    assert "tier=nvme" in stream.getvalue()
