"""Bytes and durations, as people write and read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.units import format_bytes, format_seconds, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("5", 5),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("512mib", 2**29),
        ("2k", 2000),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "5 XB", "1e3", "5 G B", "NaN", "5%"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="24GB"):
        parse_bytes(text)


def test_a_percentage_is_of_a_whole() -> None:
    assert parse_bytes("75%", of=1000) == 750


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 30.0),
        ("30s", 30.0),
        ("250ms", 0.25),
        ("5m", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("-1", None),
    ],
)
def test_durations_are_read(text: str, seconds: float | None) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "5 minutes", "5%", "inf"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="30s, 5m"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (538_090_000, "538 MB"), (1.234e9, "1.23 GB")],
)
def test_sizes_are_written(count: float, text: str) -> None:
    assert format_bytes(int(count)) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.25, "250ms"), (1.5, "1.5s"), (250, "4m 10s"), (7500, "2h 5m"), (59.96, "60s")]
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.integers(0, 10**15))
def test_what_is_written_is_read_back_within_its_three_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.006)
