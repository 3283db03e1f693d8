"""Stop strings: nothing of a match leaves, and the cut of the text into pieces changes nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.holdback import overlap
from worker.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        out += matcher.feed(piece)
        if matcher.matched is not None:
            return out, matcher.matched
    return out + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "text", "expected", "matched"),
    [
        ([], "abc", "abc", None),
        (["x"], "abc", "abc", None),
        (["c"], "abc", "ab", "c"),
        (["bc"], "abcd", "a", "bc"),
        (["ab"], "ab", "", "ab"),
        (["\n\n"], "one\n\ntwo", "one", "\n\n"),
        (["STOP"], "text ST", "text ST", None),  # a beginning that never completes is delivered
        (["aab"], "aaab", "a", "aab"),  # a failed beginning that holds a true one
        (["abcd", "bc"], "abcd", "a", "bc"),  # complete first wins
        (["bc", "abc"], "abc", "", "abc"),  # of two that end together the longer one
        (["東京"], "今日の東京は", "今日の", "東京"),
    ],
)
def test_every_cut_of_the_text_gives_the_same(stops, text, expected, matched):
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            assert run(stops, [text[:first], text[first:second], text[second:]]) == (expected, matched)
    assert run(stops, list(text)) == (expected, matched)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
)
def test_pieces_and_single_characters_agree(stops, pieces):
    text = "".join(pieces)
    out, matched = run(stops, pieces)
    assert (out, matched) == run(stops, list(text))
    if matched is None:
        assert out == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(out + matched)
        assert not any(stop in out for stop in stops)


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=6))
def test_overlap_is_the_longest_true_beginning(text, mark):
    sizes = [n for n in range(len(mark)) if text.endswith(mark[:n])]
    assert overlap(text, mark) == max(sizes)
