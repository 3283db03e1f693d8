"""Texts of people and models for data sets: lines, paragraphs, lists however they are written, code blocks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.lab.dataset import texts
from worker.lab.dataset.finishing import normal

ITEMS = st.lists(
    st.text(st.characters(categories=("L", "Nd"), include_characters=" ?"), min_size=1, max_size=20)
    .map(str.strip)
    .filter(lambda text: len(text) > 2 and not text[0].isdigit()),
    min_size=1,
    max_size=6,
)


def test_dataset_lines_and_paragraphs_know_where_they_stand() -> None:
    text = "\n one \n\n\ntwo\nthree\n\n  \nfour\n"
    assert texts.lines(text) == [(2, "one"), (5, "two"), (6, "three"), (9, "four")]
    assert texts.paragraphs(text) == [(2, "one"), (5, "two\nthree"), (9, "four")]
    assert texts.sections("a\n\nb\n---\n\n---\n c\n") == [(1, "a\n\nb"), (7, "c")]
    assert texts.lines("") == texts.paragraphs("\n\n") == texts.sections("---") == []


@given(ITEMS)
def test_a_dataset_list_is_read_however_the_model_wrote_it(items: list[str]) -> None:
    for shape in (
        json.dumps(items),
        f"Sure!\n```json\n{json.dumps(items)}\n```",
        "\n".join(f"{number}. {item}" for number, item in enumerate(items, 1)),
        "\n".join(f"{number}) {item}" for number, item in enumerate(items, 1)),
        "Here they are:\n\n" + "\n".join(f"- {item}" for item in items),
        "\n\n".join(f'* "{item}"' for item in items),
    ):
        assert texts.listed(shape) == items


@given(st.text(max_size=200))
def test_a_dataset_list_is_never_more_than_its_text(text: str) -> None:
    for item in texts.listed(text):
        assert item.strip() == item
        assert item


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", []),
        ("only one line", ["only one line"]),
        ("Here you go:\nfirst\nsecond", ["first", "second"]),
        ('[{"instruction": "a"}, {"n": 1}, 3, "b"]', ["a", "b"]),
        ("[not json\n- a\n- b", ["a", "b"]),
        ("Intro [1] text\n1. a\n2. b", ["a", "b"]),
        ("1. [a] first\n2. [b] second", ["[a] first", "[b] second"]),
    ],
)
def test_dataset_lists_by_example(text: str, items: list[str]) -> None:
    assert texts.listed(text) == items


def test_dataset_code_blocks_may_be_open_at_the_end() -> None:
    said = "Look:\n```python\ndef f():\n    return 1\n```\nand\n``` py \nassert f() == 1\n"
    assert texts.code_blocks(said) == ["def f():\n    return 1", "assert f() == 1"]
    assert texts.code_blocks("no code") == []


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Hello,  World!", "hello world", True),
        ("“Why?”", "Why", True),
        ("ﬁne\n", "FINE", True),
        ("2+2", "2-2", False),
        ("3.5", "35", False),
        ("it's", "its", False),
        ("a b", "ab", False),
    ],
)
def test_dataset_texts_are_alike_but_for_case_space_and_punctuation(one: str, other: str, same: bool) -> None:
    assert (normal(one) == normal(other)) is same
