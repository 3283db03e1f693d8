"""Data sets: which format, what is wrong on which line, and how rows become tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.dataset import Fault, Row, probe, read
from shared.errors import Refused
from tests.train.lab import chats, model_of, preferences, write_data
from worker.datasets.examples import Writer, write_all

CHAT = chats(1)[0]


def lines(folder: Path, *texts: str | bytes, name: str = "train") -> Path:
    folder.mkdir(exist_ok=True)
    raw = [text if isinstance(text, bytes) else text.encode() for text in texts]
    (folder / f"{name}.jsonl").write_bytes(b"".join(one + b"\n" for one in raw))
    return folder


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"text": "one"}, "text"),
        ({"prompt": "a", "completion": "b"}, "completion"),
        ({"prompt": "", "completion": "b"}, "completion"),
        (CHAT, "messages"),
        ({**CHAT, "tools": [{"type": "function"}]}, "messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}, "preference"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages"),
        ({"text": "one", "label": 3}, "text"),
    ],
)
def test_formats_are_told_by_their_fields(row: dict[str, Any], kind: str, tmp_path: Path) -> None:
    report = probe(write_data(tmp_path / "d", [row, row]))
    assert (report.format, report.train, report.error) == (kind, 2, "")
    assert report.has_tools == bool(row.get("tools"))
    assert [one.line for one in read(tmp_path / "d").train] == [1, 2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"text": "a"', "is not JSON"),
        (b'{"text": "\xff"}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('["text"]', "is no JSON object"),
        ("{}", "has nothing; a row has messages, or text"),
        ('{"txt": "a", "b": 1}', "has b, txt; a row has messages, or text"),
        ('{"text": 3}', "has a text that is no text"),
        ('{"text": " "}', "has an empty text"),
        ('{"prompt": "a", "completion": ""}', "has an empty completion"),
        ('{"prompt": "a", "chosen": "b", "rejected": [1]}', "has rejected[0] without a role"),
        ('{"messages": []}', "has no message in messages"),
        ('{"messages": "a"}', "has messages that are no list of messages"),
        ('{"messages": [{"content": "a"}]}', "has messages[0] without a role"),
        ('{"messages": [{"role": "user"}]}', "has messages[0] without content"),
        ('{"messages": [{"role": "user", "content": 1}]}', "has messages[0] without content"),
        ('{"text": "a", "tools": {}}', "has tools that are no list"),
        (json.dumps(CHAT), "is messages, and the data set is text since train.jsonl line 1"),
    ],
    ids=lambda one: str(one)[:30],
)
def test_a_line_that_cannot_be_used_is_named(text: str | bytes, reason: str, tmp_path: Path) -> None:
    folder = lines(tmp_path / "d", '{"text": "good"}', "", text, '{"text": "good"}')
    report = probe(folder)
    [fault] = report.faults
    assert (fault.file, fault.line) == ("train.jsonl", 3)
    assert fault.reason.startswith(reason)
    assert (report.train, report.empty, report.fault_count) == (2, 1, 1)
    with pytest.raises(Refused) as refused:
        read(folder)
    assert refused.value.failure.message == report.error
    assert f"train.jsonl: line 3 {reason}" in report.error
    assert report.error.endswith("; mend or remove them")


def test_of_many_faults_the_first_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    folder = lines(tmp_path / "d", *["{"] * 30)
    lines(folder, '{"text": 1}', name="valid")
    report = probe(folder)
    assert report.fault_count == 31
    assert [fault.line for fault in report.faults] == list(range(1, 21))
    assert "so are 30 other lines (train.jsonl 2, " in report.error


def test_a_fault_of_the_other_file_says_so(tmp_path: Path) -> None:
    folder = write_data(tmp_path / "d", chats(2))
    lines(folder, "{", name="valid")
    assert probe(folder).faults == [Fault("valid.jsonl", 1, probe(folder).faults[0].reason)]
    assert "valid.jsonl: line 1 is not JSON" in probe(folder).error


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: None, "there is no such folder"),
        (lambda folder: folder.mkdir(), "there is no train.jsonl; a data set is a folder with one"),
        (lambda folder: lines(folder), "train.jsonl: there are no rows"),
        (lambda folder: lines(folder, "", " "), "train.jsonl: there are no rows"),
        (
            lambda folder: (folder / "train.jsonl").mkdir(parents=True),
            "train.jsonl: cannot be read (a folder",
        ),
    ],
)
def test_a_folder_without_rows_says_what_is_missing(make: Any, reason: str, tmp_path: Path) -> None:
    make(tmp_path / "d")
    assert reason in probe(tmp_path / "d").error
    with pytest.raises(Refused):
        read(tmp_path / "d")


@pytest.mark.parametrize(("rows", "held"), [(9, 0), (10, 1), (35, 3)])
def test_without_a_file_of_its_own_a_tenth_is_held_out(rows: int, held: int, tmp_path: Path) -> None:
    folder = write_data(tmp_path / "d", chats(rows))
    assert (probe(folder).train, probe(folder).held_out) == (rows, held)
    data = read(folder)
    assert (len(data.train), len(data.valid), data.held_out) == (rows - held, held, held)
    assert [row.line for row in [*data.train, *data.valid]] == list(range(1, rows + 1))
    assert read(folder, split=False).valid == []
    write_data(folder, chats(rows), chats(2))
    assert (probe(folder).held_out, probe(folder).valid, len(read(folder).valid)) == (0, 2, 2)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    assert probe(lines(tmp_path / "d", b'\xef\xbb\xbf{"text": "a"}')).train == 1


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b'{"text": "a"}', b"{}", b"[]"]))))
def test_no_file_makes_a_probe_fail(tmp_path_factory: pytest.TempPathFactory, raw: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("d")
    (folder / "train.jsonl").write_bytes(b"\n".join(raw))
    report = probe(folder)
    assert bool(report.error) == (report.fault_count > 0 or report.train == 0)


# ---------------------------------------------------------------- to tokens


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return Writer(model_of("llama_tied", tmp_path))


def said(writer: Writer, row: dict[str, Any], scope: str = "response") -> list[tuple[str, str]]:
    """What comes before the response, and the response, of each example of a row."""
    found = []
    for one in writer.examples(Row("train.jsonl", 1, row), scope):
        before, after = one.tokens[: one.response], one.tokens[one.response :]
        texts = [writer.tokenizer.core.decode(ids, skip_special_tokens=False) for ids in (before, after)]
        found.append((texts[0], texts[1]))
    return found


ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_rows_are_written_as_the_server_writes_them(writer: Writer) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    wanted = [(ASKED, "yes<|im_end|>\n")]
    assert said(writer, {"messages": messages}) == wanted
    assert said(writer, {"prompt": "hi", "completion": "yes"}) == wanted
    assert said(writer, {"messages": messages}, "full") == [("", ASKED + wanted[0][1])]
    assert said(writer, {"prompt": "hi", "chosen": "yes", "rejected": "no"}) == [
        *wanted,
        (ASKED, "no<|im_end|>\n"),
    ]
    assert said(writer, {"prompt": messages[:1], "chosen": messages[1:], "rejected": "no"})[0] == wanted[0]


def test_a_text_ends_once(writer: Writer) -> None:
    [(_, text)] = said(writer, {"text": "the end"}, "full")
    assert text.removesuffix("<|im_end|>").endswith("the end")
    assert said(writer, {"text": "the end<|im_end|>"}, "full") == [("", text)]


def test_tools_are_part_of_what_is_asked(writer: Writer) -> None:
    tool = {"type": "function", "function": {"name": "weather", "description": "of a city"}}
    [(before, _)] = said(writer, {**CHAT, "tools": [tool]})
    assert "weather" in before
    assert said(writer, {**CHAT, "tools": [tool["function"]]})[0][0] == before


def test_token_counts_say_what_became_of_the_rows(writer: Writer) -> None:
    rows = [Row("train.jsonl", n, row) for n, row in enumerate(preferences(5), 1)]
    seen: list[int] = []
    kept, facts = write_all(writer, rows, "full", 10_000, seen.append)
    lengths = sorted(sum(len(one.tokens) for one in row) for row in kept)
    assert seen == [1, 2, 3, 4, 5]
    assert (facts.rows, facts.tokens, facts.longest, facts.median) == (
        5,
        sum(lengths),
        lengths[-1],
        lengths[2],
    )
    assert (facts.cut, facts.dropped) == (0, [])
    kept, facts = write_all(writer, rows, "full", 20, lambda number: None)
    assert facts.cut == 5
    assert facts.dropped == [f"train.jsonl {n}" for n in range(1, 6)]
    assert kept == []
