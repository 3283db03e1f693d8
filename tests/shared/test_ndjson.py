"""NDJSON lines: any cut of the bytes gives the same lines, and no line may outgrow its bound."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.ndjson import Lines, LineTooLong, encode

lines_of_bytes = st.lists(st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """The data in pieces."""
    borders = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in itertools.pairwise(borders)]


@given(lines_of_bytes, st.binary(max_size=10), st.lists(st.integers(0, 1000)))
def test_any_cut_gives_the_same_lines(lines: list[bytes], tail: bytes, places: list[int]) -> None:
    tail = tail.replace(b"\n", b"")
    feeder = Lines()
    data = b"".join(line + b"\n" for line in lines) + tail
    got = [line for piece in cut(data, places) for line in feeder.feed(piece)]
    assert got == lines
    assert feeder.feed(b"\n") == [tail]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=30))
def test_a_line_over_the_bound_is_refused_however_it_is_cut(sizes: list[int]) -> None:
    feeder, held = Lines(max_line=10), 0
    for size in sizes:
        held += size
        if held > 10:
            with pytest.raises(LineTooLong, match="10 bytes"):
                feeder.feed(b"x" * size)
            return
        assert feeder.feed(b"x" * size) == []


def test_a_whole_long_line_among_short_ones_is_refused_too() -> None:
    with pytest.raises(LineTooLong):
        Lines(max_line=3).feed(b"a\nbbbb\nc\n")
    with pytest.raises(LineTooLong):
        Lines(max_line=3).feed(b"a\nb\ncccc")
    assert Lines(max_line=3).feed(b"aaa\nbbb\nccc") == [b"aaa", b"bbb"]


@given(st.dictionaries(st.text(), st.text() | st.integers(-(2**53), 2**53) | st.none()))
def test_a_message_is_one_line(message: dict[str, object]) -> None:
    line = encode(message)
    assert line.count(b"\n") == 1
    assert json.loads(line) == message
