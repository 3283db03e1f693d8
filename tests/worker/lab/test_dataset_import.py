"""Data sets of the hub: pages of its viewer, what of them becomes a row, and why it refuses."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ErrorCode, Refused
from shared.lab import Dataset
from tests.fakes.viewer import Viewer
from tests.worker.lab.building import build, report, rows
from worker.lab.dataset import viewer as viewers


def source(count: int = 250) -> list[dict[str, Any]]:
    return [
        {
            "text": f"text {number} " + "x" * (number % 7),
            "label": "good" if number % 2 else "bad",
            "n": number,
        }
        for number in range(count)
    ]


def imported(
    viewer: Viewer, folder: Path, monkeypatch: pytest.MonkeyPatch, token: str = "", **inputs: Any
) -> Path:
    monkeypatch.setenv("HF_DATASETS_SERVER", viewer.url)
    monkeypatch.setenv("HF_TOKEN", token)
    spec = Dataset(template="hf_dataset_import", inputs={"hf_id": "org/set", "min_chars": 0, **inputs})
    return Path(build(spec, folder).output)


def everything(folder: Path) -> list[dict[str, Any]]:
    return [*rows(folder), *rows(folder, "valid")]


def test_a_dataset_of_the_hub_is_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Viewer(source()) as viewer:
        folder = imported(viewer, tmp_path / "all", monkeypatch, max_rows=0)
        assert [row["text"] for row in everything(folder)] == [row["text"] for row in source()]
        pages = [query for path, query in viewer.asked if path == "/rows"]
        assert [(query["offset"], query["length"]) for query in pages[1:]] == [
            ("0", "100"),
            ("100", "100"),
            ("200", "100"),
        ]
        assert {query["config"] for query in pages} == {"plain"}


def test_a_dataset_of_the_hub_ends_with_enough_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Viewer(source(5000)) as viewer:
        folder = imported(
            viewer,
            tmp_path / "some",
            monkeypatch,
            max_rows=60,
            label_column="label",
            label_filter="good",
            config="plain",
            min_chars=8,
        )
        assert len(viewer.asked) < 12
    found = everything(folder)
    assert len(found) == 60
    assert all(len(row["text"]) >= 8 for row in found)
    assert [row["text"] for row in found[:2]] == [source()[1]["text"], source()[3]["text"]]


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("text", {"text": "text 1 x"}),
        ("messages_user_only", {"messages": [{"role": "user", "content": "text 1 x"}]}),
        ("prompt_completion", {"prompt": "text 1 x", "completion": "good"}),
    ],
)
def test_a_dataset_of_the_hub_comes_in_three_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, row: dict[str, Any]
) -> None:
    with Viewer(source(4)) as viewer:
        folder = imported(viewer, tmp_path / "set", monkeypatch, output_format=form, label_column="label")
    assert everything(folder)[1] == row


def test_a_dataset_cell_that_the_viewer_cut_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_ = [*source(3), {"text": None, "label": "", "n": 3}]
    with Viewer(rows_) as viewer:
        viewer.truncated = {1: ["text"]}
        folder = imported(viewer, tmp_path / "set", monkeypatch)
    assert len(everything(folder)) == 2
    assert {one["reason"]: one["where"] for one in report(folder)["reasons"]} == {
        "the viewer gives only the beginning of the text": ["row 1"],
        "has no text": ["row 3"],
    }


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"hf_id": "../etc"}, "is no data set; write ORG/NAME"),
        ({"hf_id": "org/other"}, "does not exist"),
        ({"split": "test"}, "'test' is not there; there is train"),
        ({"text_column": "body"}, "'body' is no column; there is text, label, n"),
        ({"label_filter": "x"}, "label_filter needs it"),
        ({"output_format": "prompt_completion"}, "the completion comes from it"),
    ],
)
def test_a_dataset_that_is_not_on_the_hub_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, Any], said: str
) -> None:
    with Viewer(source(3)) as viewer, pytest.raises(Refused) as refused:
        imported(viewer, tmp_path / "set", monkeypatch, **inputs)
    assert said in str(refused.value)
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST


def test_a_gated_dataset_needs_a_token_that_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Viewer(source(3), token="hf_right") as viewer:
        assert len(everything(imported(viewer, tmp_path / "a", monkeypatch, token="hf_right"))) == 3
        with pytest.raises(Refused, match="gated or private: set HF_TOKEN") as refused:
            imported(viewer, tmp_path / "b", monkeypatch, token="hf_wrong")
    assert refused.value.failure.code is ErrorCode.HUB
    assert "hf_wrong" not in str(refused.value)


def test_a_dataset_viewer_that_is_busy_is_asked_again() -> None:
    waits: list[float] = []

    async def pause(seconds: float) -> None:
        waits.append(seconds)

    async def rows_from(url: str) -> Any:
        viewer = viewers.Viewer(pause, url=url, key="")
        try:
            query: dict[str, str | int] = {"dataset": "org/set", "offset": 0, "length": 2}
            return await viewer.fetch("/rows", query)
        finally:
            await viewer.close()

    with Viewer(source(3)) as viewer:
        viewer.statuses = [(503, {"retry-after": "4"}), (500, {})]
        assert len(asyncio.run(rows_from(viewer.url))["rows"]) == 2
        assert waits == [4.0, 2.0]
        viewer.statuses = [(503, {})] * 9
        with pytest.raises(Refused, match="answers 503") as refused:
            asyncio.run(rows_from(viewer.url))
    assert refused.value.failure.retry_after_s is not None


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "https://datasets-server.huggingface.co"),
        ({"HF_ENDPOINT": "https://huggingface.co/"}, "https://datasets-server.huggingface.co"),
        ({"HF_ENDPOINT": "https://mirror.example"}, "https://mirror.example"),
        ({"HF_ENDPOINT": "https://a", "HF_DATASETS_SERVER": "https://b/"}, "https://b"),
    ],
)
def test_the_dataset_viewer_follows_the_hub(environ: dict[str, str], url: str) -> None:
    assert viewers.endpoint(environ) == url
