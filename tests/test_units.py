import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstored import units
from kvstored.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("64GiB", 64 * 2**30),
        ("64GB", 64 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("512 kB", 512_000),
        ("512KB", 512_000),
        ("4096B", 4096),
        ("0", 0),
    ],
)
def test_a_size_is_exact_bytes(text: str, size_bytes: int) -> None:
    assert units.parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"), [("10Gbit/s", 1.25e9), ("1.2GB/s", 1.2e9), ("800MiB/s", 800 * 2**20)]
)
def test_a_rate_is_bytes_a_second(text: str, bytes_per_s: float) -> None:
    assert units.parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("500ms", 0.5), ("30s", 30), ("10min", 600), ("2h", 7200), ("7d", 604_800), ("0", 0)],
)
def test_a_duration_is_seconds(text: str, duration_s: float) -> None:
    assert units.parse_duration(text) == duration_s


@pytest.mark.parametrize(
    ("parse", "example"),
    [
        (units.parse_size, "64GiB"),
        (units.parse_rate, "10Gbit/s"),
        (units.parse_duration, "30s"),
    ],
)
def test_a_bare_number_is_refused_with_an_example(parse: object, example: str) -> None:
    assert callable(parse)
    with pytest.raises(InvalidArgument, match=f"without a unit.*{example}"):
        parse("64")


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9B", "nan", "1,5GiB", "9" * 40 + "B"])
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(InvalidArgument):
        units.parse_size(text)


def test_an_unknown_unit_names_the_near_ones() -> None:
    with pytest.raises(InvalidArgument, match="did you mean GB or GiB"):
        units.parse_size("64G")
    with pytest.raises(InvalidArgument, match="did you mean GiB"):
        units.parse_size("64gib")


def test_a_part_of_a_byte_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="whole number"):
        units.parse_size("0.3B")


@given(st.integers(min_value=0, max_value=2**62))
def test_a_formatted_size_parses_to_itself(size_bytes: int) -> None:
    assert units.parse_size(units.format_size(size_bytes)) == size_bytes


@given(st.integers(min_value=0, max_value=10**13))
def test_a_formatted_duration_parses_to_itself(micros: int) -> None:
    duration_s = micros / 10**6
    assert units.parse_duration(units.format_duration(duration_s)) == pytest.approx(duration_s)


def test_rounded_figures_are_for_people() -> None:
    assert units.format_about(1.5 * 2**30) == "1.5 GiB"
    assert units.format_about(12) == "12 B"
    assert units.format_rate(1.25e9) == "1.25 GB/s"
    assert units.format_rate(12) == "12 B/s"
