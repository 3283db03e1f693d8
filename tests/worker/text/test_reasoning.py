"""Thinking and answer are split alike however the text is cut, and look-alikes come through whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.reasoning import FORMATS, HARMONY, Start, detect_format, start_of
from worker.text.toolcalls.answer import AnswerParser

THINK = FORMATS[-1]
CHANNEL, MISTRAL = FORMATS[1:3]


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


HEAD = "<|start|>user<|message|>hi<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("form", "rendered", "final", "expected"),
    [
        (CHANNEL, "<|turn>model\n<|channel>thought\n<channel|>", None, Start(False)),
        (CHANNEL, "<|turn>model\n", None, Start(None)),
        (CHANNEL, "<|turn>model\n<|channel>thought\n", None, Start(True)),
        (CHANNEL, "<|channel>thought\nold<channel|>x<|turn>model\n", None, Start(None)),
        (MISTRAL, "[INST]hi[/INST]", None, Start(None)),
        (MISTRAL, "[INST]hi[/INST][THINK]", None, Start(True)),
        (HARMONY, HEAD, None, Start(None, header=None)),
        (HARMONY, HEAD + "<|channel|>analysis<|message|>Hm", {"reasoning_content": "Hm"},
         Start(True, False, "<|channel|>analysis")),
        (HARMONY, HEAD + "<|channel|>final<|message|>So", {"content": "So"}, Start(False, False, "<|channel|>final")),
        (THINK, "assistant\n<think>\n\n</think>\n\nSo", {"content": "So"}, Start(False, is_fresh=False)),
        (THINK, "assistant\n<think>\nHm", {"content": "", "reasoning_content": "Hm"}, Start(True, is_fresh=False)),
        (THINK, "assistant\n<think>Hm", {"content": "<think>Hm"}, Start(True, is_fresh=False)),
        (THINK, "assistant\n<think>\n", {"content": ""}, Start(True)),
    ],
)  # fmt: skip
def test_where_an_answer_goes_on_is_read_from_its_message(form, rendered, final, expected):
    assert start_of(rendered, form, final) == expected


def test_what_goes_on_keeps_its_line_breaks():
    parser = AnswerParser(None, {}, THINK, Start(False, is_fresh=False))
    assert parser.feed("\n- two") == [("text", "\n- two")]


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if enable_thinking %}<think>{% endif %}", THINK),
        ("{{ '<|channel>thought\n<channel|>' }}", CHANNEL),
        ("Your thoughts: [THINK]…[/THINK]", MISTRAL),
        ("<|start|>assistant<|channel|>final<|message|>", HARMONY),
        ("<|user|>{{ content }}<|end|><|assistant|>", None),
        ("{{ messages }}", None),
    ],
)
def test_the_format_is_found_in_the_template(template, form):
    assert detect_format(template) == form
