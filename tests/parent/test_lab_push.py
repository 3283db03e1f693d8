"""What may be pushed to the hub: what jobs made in the data folder, by any name, and nothing else on the disk."""

from pathlib import Path

import pytest

from parent.routes.push import made_here, url_of
from shared.errors import ErrorCode, Refused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "datasets" / "org" / "mine").mkdir(parents=True)
    (tmp_path / "datasets-secret" / "x").mkdir(parents=True)
    (tmp_path / "datasets" / "link").symlink_to(tmp_path / "datasets-secret")
    (tmp_path / "datasets" / "inside").symlink_to(tmp_path / "datasets" / "org")
    return tmp_path / "datasets"


@pytest.mark.parametrize("source", ["org/mine", "org/../org/mine", "./org/mine/", "inside/mine"])
def test_a_lab_folder_may_be_named_in_many_ways(root: Path, source: str) -> None:
    assert made_here(root, source) == (root / "org" / "mine").resolve()
    assert made_here(root, str(root / source)) == (root / "org" / "mine").resolve()


@pytest.mark.parametrize(
    "source",
    [
        "",
        ".",
        "..",
        "../datasets-secret/x",
        "/etc",
        "org/../../datasets-secret",
        "link",
        "link/x",
        "a\0b",
        "/",
    ],
)
def test_no_other_folder_leaves_the_lab(root: Path, source: str) -> None:
    with pytest.raises(Refused) as refused:
        made_here(root, source)
    assert refused.value.failure.code is ErrorCode.FORBIDDEN


def test_a_lab_folder_that_is_not_there_is_told(root: Path) -> None:
    with pytest.raises(Refused, match="there is no folder") as refused:
        made_here(root, "org/none")
    assert refused.value.failure.code is ErrorCode.NOT_FOUND


@pytest.mark.parametrize(
    ("endpoint", "kind", "url"),
    [
        ("", "model", "https://huggingface.co/org/x"),
        ("", "dataset", "https://huggingface.co/datasets/org/x"),
        ("https://user:secret@mirror.example/hf/", "model", "https://mirror.example/hf/org/x"),
    ],
)
def test_the_lab_says_where_a_push_will_be(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, kind: str, url: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert url_of("org/x", kind) == url
