"""`/v1/models`: pages of Anthropic's list, and what models on disk can do."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.library.abilities import abilities
from parent.library.catalog import ModelEntry
from parent.protocols import model_rows
from parent.protocols.model_rows import ModelInfo
from shared import wire
from shared.errors import ErrorCode, Refused


def rows(count: int) -> list[ModelInfo]:
    return [
        ModelInfo(
            id=f"m{number}",
            display_name="",
            created_at="2026-01-01T00:00:00Z",
            max_input_tokens=8,
            max_tokens=8,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize(
    ("query", "ids", "has_more"),
    [
        ({}, ["m0", "m1", "m2", "m3", "m4"], False),
        ({"limit": "2"}, ["m0", "m1"], True),
        ({"limit": "2", "after_id": "m1"}, ["m2", "m3"], True),
        ({"limit": "2", "after_id": "m2"}, ["m3", "m4"], False),
        ({"after_id": "m4"}, [], False),
        ({"limit": "2", "before_id": "m3"}, ["m1", "m2"], True),
        ({"limit": "2", "before_id": "m1"}, ["m0"], False),
        ({"after_id": "m1", "before_id": "m4"}, ["m2", "m3"], False),
    ],
)
def test_a_page_of_models(query: Mapping[str, str], ids: list[str], has_more: bool) -> None:
    found = model_rows.page(rows(5), query)
    assert [row.id for row in found.data] == ids
    assert found.has_more is has_more
    assert (found.first_id, found.last_id) == ((ids[0], ids[-1]) if ids else (None, None))


@given(st.integers(0, 9), st.integers(1, 5))
def test_pages_of_models_together_are_all_of_them(count: int, limit: int) -> None:
    seen: list[str] = []
    query = {"limit": str(limit)}
    for _ in range(count + 1):
        found = model_rows.page(rows(count), query)
        seen += [row.id for row in found.data]
        if not found.has_more:
            break
        query["after_id"] = str(found.last_id)
    assert seen == [row.id for row in rows(count)]


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "1001"}, {"limit": "x"}, {"after_id": "no"}, {"before_id": "no"}]
)
def test_a_page_of_models_that_cannot_be_is_refused_by_name(query: dict[str, str]) -> None:
    with pytest.raises(Refused) as caught:
        model_rows.page(rows(2), query)
    assert caught.value.failure.param == next(iter(query))
    assert caught.value.failure.code is ErrorCode.INVALID_REQUEST


FILES = [
    ({}, []),
    ({"chat_template.jinja": "{{ messages }}"}, ["chat"]),
    ({"chat_template.jinja": "{% if tools %}{% endif %}"}, ["chat", "tools"]),
    ({"tokenizer_config.json": json.dumps({"chat_template": "<think>"})}, ["chat", "thinking"]),
    (
        {"tokenizer_config.json": json.dumps({"chat_template": [{"name": "tool_use", "template": "{{ tools }}"}]})},
        ["chat", "tools"],
    ),
    ({"chat_template.json": json.dumps({"chat_template": "{{ enable_thinking }}"})}, ["chat", "thinking"]),
    ({"tokenizer_config.json": "not JSON"}, []),
    ({"tokenizer_config.json": json.dumps({"chat_template": 5})}, []),
]  # fmt: skip


@pytest.mark.parametrize(("files", "found"), FILES)
def test_what_models_on_disk_can_do_is_told_by_their_template(
    tmp_path: Path, files: dict[str, str], found: list[str]
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert abilities(ModelEntry(id="m", path=tmp_path)) == ["completion", *found]


def test_what_loaded_models_can_do_is_told_by_their_worker(tmp_path: Path) -> None:
    facts = wire.ModelFacts(
        family="f", context=1, vocab_size=1, eos_ids=[], dtype="", tools="json", reasoning=True
    )
    entry = ModelEntry(id="m", path=tmp_path)
    assert abilities(entry, facts) == ["completion", "chat", "tools", "thinking"]


@pytest.mark.parametrize(("kind", "able"), [("embedding", ["embeddings"]), ("reranker", ["rerank"])])
def test_models_that_read_write_nothing(tmp_path: Path, kind: str, able: list[str]) -> None:
    assert abilities(ModelEntry(id="m", path=tmp_path, kind=kind)) == able  # type: ignore[arg-type]
