"""What `disk.lossy` may say."""

import re

import pytest

from kvstored.codec import levels
from kvstored.codec.plan import Method, Step
from kvstored.core.types import GroupKind, GroupSpec, Heat
from kvstored.errors import InvalidArgument
from kvstored.sections import LOSSY_PATTERN

KV = GroupSpec("kv", GroupKind.LINEAR, 1 << 20, lossy_ok=True)


def test_a_level_of_a_group_goes_before_that_of_all() -> None:
    found = levels.parsed("cold=int4,kv:cold=rotated3,kv:shared=int8")
    assert levels.level_of(found, KV, Heat.COLD) == Step(Method.ROTATED, 3)
    assert levels.level_of(found, KV, Heat.SHARED) == levels.MODES["int8"]
    other = GroupSpec("v", GroupKind.LINEAR, 1 << 20, lossy_ok=True)
    assert levels.level_of(found, other, Heat.COLD) == levels.MODES["int4"]
    assert levels.level_of(found, other, Heat.SHARED) is None


@pytest.mark.parametrize("heat", [Heat.SINK, Heat.RECENT, 77])
def test_sinks_and_the_recent_window_are_exact(heat: int) -> None:
    found = levels.parsed("cold=int4,shared=int4")
    assert levels.level_of(found, KV, heat) is None


@pytest.mark.parametrize(
    "text",
    ["", "off,cold=int4", "sink=int4", "recent=int8", "cold", "cold=int5", "=int4", "kv:=int4"],
)
def test_what_is_no_level_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="no such level"):
        levels.parsed(text)
    assert not re.fullmatch(LOSSY_PATTERN, text)


@pytest.mark.parametrize("mode", levels.MODES)
def test_the_configuration_takes_what_can_be_parsed(mode: str) -> None:
    for text in ("off", f"cold={mode}", f"kv:shared={mode},cold={mode}"):
        assert re.fullmatch(LOSSY_PATTERN, text)
        assert len(levels.parsed(text)) == text.count("=")
