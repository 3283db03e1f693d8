"""Thinking and answer are split alike however the text is cut, and look-alikes come through whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.reasoning import FORMATS, Start, detect_format, start_of
from worker.text.toolcalls.answer import AnswerParser

THINK = FORMATS[-1]
CHANNEL = FORMATS[1]


def run(pieces: list[str], begins: bool | None) -> tuple[str, str]:
    splitter = AnswerParser(None, {}, THINK, Start(begins))
    found = [pair for piece in pieces for pair in splitter.feed(piece)] + splitter.flush()
    return (
        "".join(text for kind, text in found if kind == "reasoning"),
        "".join(text for kind, text in found if kind == "text"),
    )


CASES = [
    (None, "<think>\nhm</think>\n\nyes", ("hm", "yes")),
    (None, "  <think>hm</think>yes", ("hm", "yes")),
    (None, "yes", ("", "yes")),
    (None, "a < b and </thin", ("", "a < b and </thin")),
    (None, "<thin", ("", "<thin")),
    (None, "the <think> tag </think> is text here", ("", "the <think> tag </think> is text here")),
    (None, "   ", ("", "   ")),
    (True, "hm, a < b </think>yes", ("hm, a < b ", "yes")),
    (True, "hm </thin", ("hm </thin", "")),  # truncated thinking is thinking
    (True, "\nhm\n</think>\n\nyes\n", ("hm\n", "yes\n")),
    (True, "a</think>b</think>c", ("a", "b</think>c")),
    (False, "\n\nyes <think>", ("", "yes <think>")),
]


@pytest.mark.parametrize(("begins", "text", "expected"), CASES)
def test_every_cut_gives_the_same_split(begins, text, expected):
    assert run([text], begins) == expected
    assert run(list(text), begins) == expected
    for cut in range(len(text)):
        assert run([text[:cut], text[cut:]], begins) == expected


@given(st.lists(st.sampled_from(["<think>", "</think>", "<", "think", ">", "a", "\n", " ", "</"]), max_size=14),
       st.sampled_from([None, True, False]))  # fmt: skip
def test_pieces_and_single_characters_agree(pieces, begins):
    assert run(pieces, begins) == run(list("".join(pieces)), begins)


@pytest.mark.parametrize(
    ("rendered", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", None),
        ("user: what does <think> mean?\nassistant:", None),
        ("assistant\n<think>old</think>x\nuser\nhi\nassistant\n", None),
    ],
)
def test_where_the_answer_begins_is_read_from_the_end_of_the_prompt(rendered, expected):
    assert start_of(rendered, THINK).thinking is expected


def test_the_format_is_found_in_the_template():
    assert detect_format("{% if enable_thinking %}<think>{% endif %}") == THINK
    assert detect_format("{{ messages }}") is None
