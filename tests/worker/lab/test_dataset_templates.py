"""The templates of data sets that ask no model: what becomes a row, and what is dropped where and why."""

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import Refused
from tests.worker.lab.building import drops_of, made, rows_of


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# ---------------------------------------------------------------- sft_qa_pairs


def test_dataset_pairs_are_split_at_questions_and_keep_their_paragraphs() -> None:
    text = """\
Preface

Q: What is it?
A: A lamp.

It is old,
  and green.

**Question:** Why?
answer: Because.
q: no answer

Q:
A: no question
A: more of it
"""
    found, dropped, model = made("sft_qa_pairs", {"pairs_text": text})
    assert rows_of(found) == [
        chat("What is it?", "A lamp.\n\nIt is old,\n  and green."),
        chat("Why?", "Because."),
    ]
    assert [(drop.where, drop.reason) for drop in dropped] == [
        ("line 1", "stands before the first Q:"),
        ("line 11", "the question has no answer"),
        ("line 13", "the question is empty"),
    ]
    assert model.asked == []


def test_a_dataset_answer_before_any_question_is_dropped() -> None:
    found, dropped, _ = made("sft_qa_pairs", {"pairs_text": "A: lonely\nQ: a\nA: b"})
    assert rows_of(found) == [chat("a", "b")]
    assert dropped[0].reason == "an answer without a question"


LINES = st.lists(
    st.text(st.characters(categories=("L", "Nd"), include_characters=" ,"), max_size=12),
    min_size=1,
    max_size=3,
).map(lambda lines: "\n".join(lines).strip())


@given(st.lists(st.tuples(LINES, LINES), max_size=5), st.sampled_from(["\n", "\n\n", "\n \n\n"]))
def test_dataset_pairs_come_back_as_they_were_written(pairs: list[tuple[str, str]], between: str) -> None:
    text = between.join(f"Q: {question}\nA: {answer}" for question, answer in pairs)
    whole = [(question, answer) for question, answer in pairs if question and answer]
    if not text.strip():
        return
    found, dropped, _ = made("sft_qa_pairs", {"pairs_text": text})
    assert rows_of(found) == [chat(*pair) for pair in whole]
    assert len(dropped) == len(pairs) - len(whole)


# ---------------------------------------------------------------- dpo_pref_pairs


def test_a_dataset_of_preferences_is_read_by_the_names_of_its_columns() -> None:
    text = 'id,Rejected,prompt, chosen \n1,bad,"What, ""this""?","two\nlines"\n2,,p,c\n3,r,p\n\n4,r,p,c\n'
    found, dropped, _ = made("dpo_pref_pairs", {"csv_text": "\ufeff" + text})
    assert rows_of(found) == [
        {"prompt": 'What, "this"?', "chosen": "two\nlines", "rejected": "bad"},
        {"prompt": "p", "chosen": "c", "rejected": "r"},
    ]
    assert [(drop.where, drop.reason) for drop in dropped] == [
        ("line 4", "has an empty rejected"),
        ("line 5", "has 3 cells, and the header 4"),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt,chosen\na,b\n", "line 1 is the header and has no rejected"),
        ('prompt,chosen,rejected\na,"b,c\n', "line 2: unexpected end of data"),
        ('prompt,chosen,rejected\na,"b"x,c\n', "line 2: "),
    ],
)
def test_a_broken_dataset_table_is_refused_with_its_line(text: str, said: str) -> None:
    with pytest.raises(Refused) as refused:
        made("dpo_pref_pairs", {"csv_text": text})
    assert said in str(refused.value)
    assert refused.value.failure.param == "inputs.csv_text"


CELLS = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), include_characters='",\n'), min_size=1, max_size=12
)


@given(st.lists(st.tuples(CELLS, CELLS, CELLS), max_size=5))
def test_a_dataset_table_comes_back_as_it_was_written(rows: list[tuple[str, str, str]]) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("prompt", "chosen", "rejected"), *rows])
    found, dropped, _ = made("dpo_pref_pairs", {"csv_text": text.getvalue()})
    whole = [row for row in rows if all(cell.strip() for cell in row)]
    assert [tuple(row.values()) for row in rows_of(found)] == whole
    blank = [row for row in rows if not any(cell.strip() for cell in row)]
    assert len(dropped) == len(rows) - len(whole) - len(blank)


# ---------------------------------------------------------------- format_conversion


def test_dataset_lines_of_json_become_chats_and_bad_ones_are_named() -> None:
    good = '{"q": "a", "a": "b"}\n\nnot json\n[1]\n{"q": "a"}\n{"q": "a", "a": true}'
    text = f'{good}\n{{"q": 3, "a": 4.5}}\n{{"q": "x", "a": ""}}'
    found, dropped, _ = made(
        "format_conversion", {"input_jsonl": text, "user_key": "q", "assistant_key": "a"}
    )
    assert rows_of(found) == [chat("a", "b"), chat("3", "4.5")]
    assert [(drop.where, drop.reason) for drop in dropped] == [
        ("line 3", "is not JSON"),
        ("line 4", "is no JSON object"),
        ("line 5", "has no text under 'a'"),
        ("line 6", "has no text under 'a'"),
        ("line 8", "has no text under 'a'"),
    ]


# ---------------------------------------------------------------- code_completion

SOURCE = '''\
import os


@decorated
def first(number):
    """Add one."""
    result = number + 1
    return result


class Second:
    def method(self):
        return "a method belongs to its class"


x = 1


async def third():
    return None  # and what follows belongs to it


def s(): 0
'''


def write_sources(folder: Path) -> Path:
    for name in ("b.py", "a/c.py", ".hidden/d.py", "node_modules/e.py", "venv/lib/f.py", ".g.py", "h.txt"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE)
    (folder / "venv" / "pyvenv.cfg").touch()
    (folder / "binary.py").write_bytes(b"\xff\xfe\x00")
    (folder / "link.py").symlink_to(folder / "b.py")
    (folder / "large.py").write_bytes(b"#" * ((1 << 20) + 1))
    return folder


def test_a_dataset_of_code_is_cut_within_functions_of_the_folder_s_own_files(tmp_path: Path) -> None:
    folder = write_sources(tmp_path / "src")
    found, dropped, _ = made("code_completion", {"src_dir": str(folder)})
    rows = rows_of(found)
    wholes = [row["prompt"] + row["completion"] for row in rows]
    assert len(rows) == 6
    assert wholes[:3] == wholes[3:]
    assert (
        wholes[0]
        == '@decorated\ndef first(number):\n    """Add one."""\n    result = number + 1\n    return result'
    )
    assert wholes[1].startswith("class Second:")
    assert wholes[1].endswith("x = 1")
    for row, whole in zip(rows, wholes, strict=True):
        assert len(whole) // 4 <= len(row["prompt"]) <= len(whole) * 3 // 4 + 1
    assert sorted((drop.where, drop.reason) for drop in dropped) == [
        ("binary.py", "is no text"),
        ("large.py", "is larger than 1048576 bytes"),
    ]


def test_a_dataset_of_code_depends_on_its_seed_alone(tmp_path: Path) -> None:
    folder = write_sources(tmp_path / "src")
    inputs = {"src_dir": str(folder), "max_pairs": 3}
    first, again, other = (made("code_completion", inputs, seed=seed)[0] for seed in (1, 1, 2))
    assert rows_of(first) == rows_of(again) != rows_of(other)
    assert len(rows_of(first)) == 3


@pytest.mark.parametrize(
    ("path", "said"), [("src", "must be an absolute path"), ("/no/such/folder", "is no folder")]
)
def test_a_dataset_of_code_needs_a_folder(path: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        made("code_completion", {"src_dir": path})


def test_nothing_of_a_dataset_template_is_dropped_silently() -> None:
    found, dropped, _ = made("sft_qa_pairs", {"pairs_text": "Q: a\nA: b\n\nQ: a\nA: b"})
    assert (len(rows_of(found)), dropped, drops_of(found)) == (2, [], [])  # doubles are the job's to find
