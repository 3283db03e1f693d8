"""Bodies of `/v1/embeddings` and `/v1/rerank`, their answers, and what an encoder costs."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.library.catalog import ModelEntry, default_entry, read_entry
from parent.library.machine import cpu
from parent.pool.estimate import bill_of
from parent.protocols import rerank
from parent.protocols.base import Manners
from parent.protocols.openai import embeddings as openai_embeddings
from shared import wire
from shared.control import LaunchModel
from shared.encoders import ENCODERS
from shared.errors import ErrorCode, Refused
from tests.oracles import encoders
from tests.oracles.checkpoints import write_case

Text, Ids = wire.TextPrompt, wire.TokenPrompt


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


@pytest.mark.parametrize(
    ("given_", "inputs"),
    [
        ("é 東京 👩‍👩‍👧\x00", [Text("é 東京 👩‍👩‍👧\x00")]),
        (["a", "b"], [Text("a"), Text("b")]),
        ([1, 2, 3], [Ids([1, 2, 3])]),
        ([[1], [2, 3]], [Ids([1]), Ids([2, 3])]),
        (["a", [1, 2]], [Text("a"), Ids([1, 2])]),
    ],
)
def test_embeddings_inputs_in_each_form(given_: Any, inputs: list[Any]) -> None:
    asked = openai_embeddings.decode(body(input=given_, model="m", user="u"))
    assert asked.request == wire.EmbedRequest(inputs=inputs)
    assert (asked.model, asked.as_base64, asked.keep_alive_s) == ("m", False, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dimensions": 8}, {"dimensions": 8}),
        ({"instruction": "find: "}, {"prompt": "find: "}),
        ({"prompt_name": "query"}, {"prompt_name": "query"}),
        ({"input_type": "query"}, {"role": "query"}),
        ({"input_type": "search_document"}, {"role": "document"}),
        ({"input_type": "PASSAGE"}, {"role": "document"}),
        ({"input_type": "classification"}, {}),
        ({"truncate_prompt_tokens": -1}, {"truncate": -1}),
        ({"truncate_prompt_tokens": 5}, {"truncate": 5}),
        ({"dimensions": None, "encoding_format": None, "truncate_prompt_tokens": None}, {}),
    ],
)
def test_embeddings_fields_reach_the_worker(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    asked = openai_embeddings.decode(body(input="x", **fields))
    assert asked.request == wire.EmbedRequest(inputs=[Text("x")], **expected)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1, "a"]]}, "input[0][1]"),
        ({"input": [1, "a"]}, "input[1]"),
        ({"input": [True]}, "input[0]"),
        ({"input": [-1]}, "input[0]"),
        ({"input": [1, 1 << 31]}, "input[1]"),
        ({"input": [1.5]}, "input[0]"),
        ({"input": 5}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"input": "a", "instruction": "x", "prompt_name": "y"}, "prompt_name"),
        ({"input": "a", "keep_alive": "soon"}, "keep_alive"),
    ],
)
def test_embeddings_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        openai_embeddings.decode(body(**fields))
    failure = refused.value.failure
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert "\n" not in failure.message


def test_embeddings_and_rerank_know_their_fields_where_the_server_is_strict() -> None:
    strict = Manners(is_strict=True)
    openai_embeddings.decode(body(input="a", user="u", encoding_format="float"), strict)
    with pytest.raises(Refused, match="dimensions"):
        openai_embeddings.decode(body(input="a", dimension=5), strict)
    with pytest.raises(Refused, match="top_n"):
        rerank.decode(body(query="a", documents=["b"], top_k=5), strict)


@given(st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=3, max_size=3), min_size=1))
def test_embeddings_as_numbers_and_as_base64_are_the_same(rows: list[list[float]]) -> None:
    found = wire.EmbedResult(b"".join(struct.pack("<3f", *row) for row in rows), 3, 7)
    plain = openai_embeddings.answer(found, "m", as_base64=False)
    packed = openai_embeddings.answer(found, "m", as_base64=True)
    assert [each.embedding for each in plain.data] == rows
    for one, other in zip(plain.data, packed.data, strict=True):
        assert isinstance(other.embedding, str)
        assert list(struct.unpack("<3f", base64.b64decode(other.embedding))) == one.embedding
    assert [each.index for each in plain.data] == list(range(len(rows)))


def test_embeddings_have_the_shape_of_openai() -> None:
    found = wire.EmbedResult(struct.pack("<2f", 0.5, 1), 2, 7)
    assert msgspec.to_builtins(openai_embeddings.answer(found, "m", as_base64=False)) == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }


def test_rerank_documents_are_texts_or_objects_with_one() -> None:
    asked = rerank.decode(body(query="q", documents=["a", {"text": "b", "title": "t"}], model="m", top_n=9))
    assert asked.request == wire.RankRequest(query="q", documents=["a", "b"])
    assert (asked.model, asked.top_n, asked.with_documents) == ("m", 2, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": ["a"] * 2049}, "documents"),
        ({"query": "q", "documents": ["a", 5]}, "documents[1]"),
        ({"query": "q", "documents": ["a", ""]}, "documents[1]"),
        ({"query": "q", "documents": [{"title": "t"}]}, "documents[0]"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_rerank_refuses_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        rerank.decode(body(**fields))
    assert refused.value.failure.param == param


def test_rerank_answers_with_the_best_first_and_equals_in_their_order() -> None:
    asked = rerank.decode(body(query="q", documents=["a", "b", "c", "d"], top_n=3, return_documents=True))
    found = wire.RankResult([0.1, 0.9, 0.1, 0.5], 20)
    assert json.loads(msgspec.json.encode(rerank.answer(asked, found, "m", "r1"))) == {
        "id": "rerank-r1",
        "model": "m",
        "results": [
            {"index": 1, "relevance_score": 0.9, "document": {"text": "b"}},
            {"index": 3, "relevance_score": 0.5, "document": {"text": "d"}},
            {"index": 0, "relevance_score": 0.1, "document": {"text": "a"}},
        ],
        "usage": {"prompt_tokens": 20, "total_tokens": 20},
    }
    bare = rerank.decode(body(query="q", documents=["a"]))
    assert msgspec.to_builtins(rerank.answer(bare, wire.RankResult([0.0], 1), "m", "r"))["results"] == [
        {"index": 0, "relevance_score": 0.0}
    ]


# ---------------------------------------------------------------- library and ledger


def entry_of(name: str, folder: Path, **files: Any) -> ModelEntry:
    return read_entry(encoders.write_case(name, folder / name, **files), name)


def test_embeddings_encoders_are_those_of_the_worker() -> None:
    from worker.models import ENCODERS as HELD

    assert set(ENCODERS) == set(HELD)


@pytest.mark.parametrize("name", encoders.names())
def test_embeddings_an_encoder_is_listed_with_its_kind(tmp_path: Path, name: str) -> None:
    entry = entry_of(name, tmp_path)
    assert (entry.error, entry.support, entry.kv_bytes_per_token) == ("", "native", 0)
    assert entry.kind == ("reranker" if name.endswith("reranker") else "embedding")


def test_embeddings_a_model_for_vectors_is_told_by_its_modules(tmp_path: Path) -> None:
    folder = write_case("qwen3", tmp_path / "m")
    assert read_entry(folder, "m").kind == "chat"
    before = read_entry(folder, "m").signature
    (folder / "modules.json").write_text("[]")
    after = read_entry(folder, "m")
    assert (after.kind, after.error) == ("embedding", "")
    assert after.signature != before


def test_embeddings_a_classifier_is_listed_as_unsupported(tmp_path: Path) -> None:
    folder = encoders.write_case("bert_reranker", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    entry = read_entry(folder, "m")
    assert entry.unsupported
    assert "into 2 classes" in entry.error


def test_embeddings_the_default_model_is_one_that_writes() -> None:
    def made(name: str, kind: Any) -> ModelEntry:
        return ModelEntry(id=name, path=Path(name), kind=kind)

    assert default_entry([made("a", "embedding"), made("b", "chat")]).id == "b"
    assert default_entry([made("b", "reranker"), made("a", "embedding")]).id == "a"


def test_embeddings_an_encoder_costs_its_weights_and_its_largest_forward(tmp_path: Path) -> None:
    entry = entry_of("bert", tmp_path)
    device = cpu(1 << 34)
    launch = LaunchModel(model_id="bert", path=str(entry.path), prefix_cache_bytes=1 << 30)
    bill = bill_of(entry, launch, device)
    assert bill.weights == entry.bytes
    assert (bill.kv_wish, bill.kv_least, bill.prefix_wish) == (0, 0, 0)
    assert bill.wish == bill.least == bill.weights + bill.transient
    wide = bill_of(entry, msgspec.structs.replace(launch, prefill_chunk=8192), device)
    assert wide.transient == 8 * bill.transient
