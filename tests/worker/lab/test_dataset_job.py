"""The job that builds a data set: its files, its report, and that a death changes nothing of either."""

from pathlib import Path
from typing import Any

import pytest

from shared.dataset import probe
from shared.errors import ErrorCode, Refused
from shared.jobs import JobEvent, JobLog, JobSaved, JobStage
from shared.lab import Dataset
from tests.fakes.answers import Answers
from tests.worker.lab.building import build, report, rows

PAIRS = "\n\n".join(f"Q: question {number}\nA: answer {number}" for number in range(20))


def pairs(text: str = PAIRS, **more: Any) -> Dataset:
    return Dataset(template="sft_qa_pairs", inputs={"pairs_text": text}, **more)


def styles(url: str, count: int = 8, **more: Any) -> Dataset:
    text = "\n\n".join(f"Paragraph {number}." for number in range(count))
    return Dataset(
        template="style_transfer", inputs={"reference_samples": "Arr!", "raw_text": text}, url=url, **more
    )


def echo(messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
    """Depends on the question and the seed, as a model's does."""
    return f"{messages[-1]['content']} {body['seed']}"


def logs(events: list[JobEvent]) -> list[str]:
    return [event.line for event in events if isinstance(event, JobLog)]


def test_a_dataset_is_a_folder_that_can_be_trained_on(tmp_path: Path) -> None:
    events: list[JobEvent] = []
    done = build(pairs(), tmp_path / "sets" / "mine", events=events)
    folder = Path(done.output)
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "train.jsonl", "valid.jsonl"]
    assert (len(rows(folder)), len(rows(folder, "valid"))) == (18, 2)
    assert rows(folder, "valid")[1]["messages"][0]["content"] == "question 19"
    found = probe(folder)
    assert (found.format, found.train, found.valid, found.error) == ("messages", 18, 2, "")
    assert done.summary == "20 rows, 18 to train on and 2 held out"
    stages = [event for event in events if isinstance(event, JobStage)]
    assert [event.stage for event in stages[:2]] == ["plan", "make"]
    assert (stages[-2].done, stages[-2].total, stages[-1].stage) == (20, 20, "write")
    previews = [line for line in logs(events) if line.startswith("row: ")]
    assert len(previews) == 3
    assert '"question 0"' in previews[0]


@pytest.mark.parametrize(
    ("count", "train", "valid"), [(1, 1, 1), (2, 1, 1), (9, 8, 1), (10, 9, 1), (19, 17, 2)]
)
def test_a_dataset_is_split_nine_to_one(tmp_path: Path, count: int, train: int, valid: int) -> None:
    text = "\n".join(f"Q: {number}\nA: {number}" for number in range(count))
    folder = Path(build(pairs(text), tmp_path / "mine").output)
    assert (len(rows(folder)), len(rows(folder, "valid"))) == (train, valid)
    if count == 1:
        assert rows(folder) == rows(folder, "valid")


def test_the_report_of_a_dataset_says_what_is_not_in_it(tmp_path: Path) -> None:
    text = "nothing\nQ: Hello!\nA: Hi.\nQ: Hello!\nA: Hi.\nQ: hello\nA: hi\nQ: alone\nQ: Bye\nA: Bye"
    events: list[JobEvent] = []
    folder = Path(build(pairs(text), tmp_path / "mine", events=events).output)
    found = report(folder)
    assert (found["rows"], found["duplicates_exact"], found["duplicates_near"], found["dropped"]) == (
        2,
        1,
        1,
        2,
    )
    assert {one["reason"]: one["where"] for one in found["reasons"]} == {
        "stands before the first Q:": ["line 1"],
        "the question has no answer": ["line 8"],
    }
    assert found["format"] == "messages"
    assert found["template"] == "sft_qa_pairs"
    assert found["preview"][0]["messages"][0]["content"] == "Hello!"
    assert found["chars"] == {"shortest": 6, "median": 9, "longest": 9, "total": 15}
    assert any(line.startswith("left out, 1 times: ") for line in logs(events))
    whole = Path(build(pairs(text, deduplicate=False), tmp_path / "all").output)
    assert report(whole)["rows"] == 4


def test_a_dataset_without_rows_is_a_failure_with_reasons(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no row came of it: the question has no answer \(2\)") as refused:
        build(pairs("Q: a\nQ: b"), tmp_path / "mine")
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(Refused, match="the inputs hold nothing"):
        build(
            Dataset(template="dpo_pref_pairs", inputs={"csv_text": "prompt,chosen,rejected"}), tmp_path / "x"
        )


@pytest.mark.parametrize(
    ("spec", "param"),
    [
        (Dataset(template="nothing"), "template"),
        (Dataset(template="sft_qa_pairs"), "inputs.pairs_text"),
        (styles(""), "url"),
    ],
)
def test_a_dataset_that_cannot_be_is_refused_before_anything_is_made(
    tmp_path: Path, spec: Dataset, param: str
) -> None:
    with pytest.raises(Refused) as refused:
        build(spec, tmp_path / "mine", work=tmp_path / "work")
    assert refused.value.failure.param == param
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_never_replaces_a_folder_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(Refused, match="exists; choose another name") as refused:
        build(pairs(), tmp_path / "mine", work=tmp_path / "jobs" / "a")
    assert refused.value.failure.code is ErrorCode.CONFLICT
    done = build(pairs(), tmp_path / "other", work=tmp_path / "jobs" / "a")
    assert (
        build(pairs(), tmp_path / "other", work=tmp_path / "jobs" / "a") == done
    )  # it died before it said so
    with pytest.raises(Refused, match="exists"):
        build(pairs(), tmp_path / "other", work=tmp_path / "jobs" / "b")


def test_a_dataset_says_that_its_own_folder_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "work").write_text("a file")
    with pytest.raises(Refused, match=r"work: cannot be written \(File exists\)") as refused:
        build(pairs(), tmp_path / "mine", work=tmp_path / "work")
    assert refused.value.failure.code is ErrorCode.CONFLICT
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_a_dataset_says_that_its_folder_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "sets").write_text("a file")
    with pytest.raises(Refused, match="cannot be written"):
        build(pairs(), tmp_path / "sets" / "mine")


def test_a_dataset_asks_many_at_once_and_keeps_their_order(tmp_path: Path) -> None:
    with Answers(echo) as server:
        folder = Path(build(styles(server.url, streams=4), tmp_path / "mine").output)
        body = server.asked[0]
    assert [row["prompt"] for row in [*rows(folder), *rows(folder, "valid")]] == [
        f"Paragraph {number}." for number in range(8)
    ]
    assert 1 < server.most_at_once <= 4
    assert len({asked["seed"] for asked in server.asked}) == 8
    assert (body["temperature"], body["max_tokens"]) == (0.7, 512)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "model" not in body


def test_the_streams_of_a_dataset_do_not_change_it(tmp_path: Path) -> None:
    with Answers(echo) as server:
        one, many, other = (
            Path(build(styles(server.url, **how), tmp_path / name).output)
            for name, how in (("one", {"streams": 1}), ("many", {"streams": 8}), ("other", {"seed": 7}))
        )
    for name in ("train.jsonl", "valid.jsonl", "report.json"):
        assert (one / name).read_bytes() == (many / name).read_bytes()
    assert (one / "train.jsonl").read_bytes() != (other / "train.jsonl").read_bytes()


@pytest.mark.parametrize("dies_at", [0, 2, 5])
def test_a_dataset_that_died_goes_on_and_is_the_same(tmp_path: Path, dies_at: int) -> None:
    stopped: list[bool] = []

    def until_then(messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
        if len(server.asked) > dies_at:
            stopped.append(True)
        return echo(messages, body)

    with Answers(echo) as server:
        whole = Path(build(styles(server.url), tmp_path / "whole").output)
        server.asked.clear()
        server.reply = until_then
        work, events = tmp_path / "jobs" / "a", list[JobEvent]()
        with pytest.raises(Refused) as refused:
            build(
                styles(server.url, streams=1),
                tmp_path / "mine",
                work=work,
                events=events,
                should_stop=lambda: bool(stopped),
            )
        assert refused.value.failure.code is ErrorCode.SHUTTING_DOWN
        assert isinstance(events[-1], JobSaved)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs", "whole"]
        journal = work / "units.jsonl"
        kept = journal.read_bytes()
        journal.write_bytes(kept[:-3])  # a kill cuts the last line off
        there = max(kept.count(b"\n") - 2, 0)
        server.reply = echo
        server.asked.clear()
        events.clear()
        build(styles(server.url), tmp_path / "mine", work=work, events=events)
        assert len(server.asked) == 8 - there
        assert there == 0 or logs(events)[0] == f"goes on: {there} of 8 units are there"
    for name in ("train.jsonl", "valid.jsonl"):
        assert (whole / name).read_bytes() == (tmp_path / "mine" / name).read_bytes()


def test_a_dataset_of_other_inputs_is_begun_anew(tmp_path: Path) -> None:
    work, events = tmp_path / "jobs" / "a", list[JobEvent]()
    build(pairs("Q: a\nA: b"), tmp_path / "one", work=work)
    build(pairs("Q: a\nA: c"), tmp_path / "two", work=work, events=events)
    assert rows(tmp_path / "two")[0]["messages"][1]["content"] == "c"
    assert "begun anew" in logs(events)[0]


def test_a_dataset_is_stopped_while_it_waits_for_an_answer(tmp_path: Path) -> None:
    with Answers(echo) as server:
        server.hold.clear()
        with pytest.raises(Refused) as refused:
            build(styles(server.url), tmp_path / "mine", work=tmp_path / "w", should_stop=server.came.is_set)
    assert refused.value.failure.code is ErrorCode.SHUTTING_DOWN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w"]


def test_a_dataset_fails_where_the_model_is_not_there(tmp_path: Path) -> None:
    with Answers(echo) as server:
        server.statuses = [(404, {})] * 8
        with pytest.raises(Refused, match="answers 404: status 404") as refused:
            build(styles(server.url, model="nobody"), tmp_path / "mine")
    assert refused.value.failure.code is ErrorCode.MODEL_NOT_FOUND
    assert server.asked[0]["model"] == "nobody"


def test_a_dataset_leaves_out_what_the_server_refuses(tmp_path: Path) -> None:
    with Answers(echo) as server:
        server.statuses = [(400, {})]
        folder = Path(build(styles(server.url, streams=1), tmp_path / "mine").output)
    [one] = report(folder)["reasons"]
    assert (one["count"], one["where"]) == (1, ["line 1"])
    assert "answers 400: status 400" in one["reason"]
    assert report(folder)["rows"] == 7
