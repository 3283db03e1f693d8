"""Embeddings and rerank over HTTP with the real worker on tiny models: OpenAI's SDK, many clients, the pool."""

import concurrent.futures
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.real import serving
from tests.oracles import encoders
from tests.oracles.checkpoints import write_case
from tests.process.harness import Served

TEXTS = ["the cat", "东京 é 👩‍👩‍👧 \x00", "x" * 90, "a"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The default model writes; `vectors` and `ranks` are encoders of the library."""
    root = tmp_path_factory.mktemp("served")
    encoders.write_case("bert", root / "data" / "models" / "vectors")
    encoders.write_case("xlm_roberta_reranker", root / "data" / "models" / "ranks")
    with serving(write_case("llama_tied", root / "tiny"), root) as running:
        running.wait_state("ready")
        yield running


@pytest.fixture
def sdk(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def post(server: Served, path: str, **body: Any) -> httpx2.Response:
    return server.http.post(path, json=body)


@pytest.mark.parametrize("model", ["vectors", "tiny"])
def test_embeddings_of_the_official_sdk_are_the_same_as_numbers_and_as_base64(
    sdk: openai.OpenAI, model: str
) -> None:
    packed = sdk.embeddings.create(model=model, input=TEXTS)
    plain = sdk.embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert packed.model == model
    assert [each.index for each in packed.data] == [0, 1, 2, 3]
    for each, other in zip(packed.data, plain.data, strict=True):
        # The texts may come to share their steps in another way: last places differ.
        assert each.embedding == pytest.approx(other.embedding, abs=1e-5)
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0
    for each in packed.data:
        assert abs(math.hypot(*each.embedding) - 1) < 1e-5
    short = sdk.embeddings.create(model=model, input=TEXTS, dimensions=8)
    for each, whole in zip(short.data, packed.data, strict=True):
        length = math.hypot(*whole.embedding[:8])
        assert each.embedding == pytest.approx([value / length for value in whole.embedding[:8]], abs=1e-6)


def test_embeddings_of_fifty_clients_at_once_are_those_of_each_alone(sdk: openai.OpenAI) -> None:
    asked = [[text * (1 + n % 3) for text in TEXTS[: 1 + n % 4]] for n in range(50)]
    asked = [[text[:100] for text in texts] for texts in asked]

    def ask(texts: list[str]) -> list[list[float]]:
        return [each.embedding for each in sdk.embeddings.create(model="vectors", input=texts).data]

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        together = list(pool.map(ask, asked))
    for texts, found in zip(asked, together, strict=True):
        for one, other in zip(found, ask(texts), strict=True):
            assert one == pytest.approx(other, abs=1e-6)


def test_embeddings_beside_chats_of_the_same_model(server: Served, sdk: openai.OpenAI) -> None:
    def chat(n: int) -> str:
        body = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 30, "temperature": 0}
        return str(post(server, "/v1/chat/completions", **body).json()["choices"][0]["message"]["content"])

    alone = chat(0)
    vectors = [each.embedding for each in sdk.embeddings.create(model="tiny", input=TEXTS).data]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = pool.map(chat, range(4))
        found = [pool.submit(sdk.embeddings.create, model="tiny", input=TEXTS) for _ in range(4)]
        assert set(answers) == {alone}
        for each in found:
            for one, other in zip(each.result().data, vectors, strict=True):
                assert one.embedding == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_request"),
        ({"input": ["a", ""]}, "input[1]", "invalid_request"),
        ({"input": "x" * 500}, "input", "context_length_exceeded"),
        ({"input": "a", "dimensions": 4000}, "dimensions", "invalid_request"),
        ({"input": [[5, 99999]]}, "input", "invalid_request"),
        ({"input": "a", "prompt_name": "none"}, "prompt_name", "invalid_request"),
        ({"input": "a", "model": "ranks"}, "model", "unsupported"),
    ],
)
def test_embeddings_errors_have_the_shape_of_openai(
    server: Served, body: dict[str, Any], param: str, code: str
) -> None:
    answer = post(server, "/v1/embeddings", **{"model": "vectors", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"], error["code"]) == (
        400,
        "invalid_request_error",
        param,
        code,
    )


def test_embeddings_of_an_unknown_model_are_a_404(server: Served) -> None:
    assert post(server, "/v1/embeddings", input="a", model="nope").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_embeddings_models_refuse_to_write_and_say_what_they_can_do(
    server: Served, path: str, body: dict[str, Any]
) -> None:
    for model, told in (("vectors", "POST /v1/embeddings"), ("ranks", "POST /v1/rerank")):
        answer = post(server, path, model=model, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
        assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
@pytest.mark.parametrize("model", ["ranks", "vectors", "tiny"])
def test_rerank_sorts_documents_by_their_scores(server: Served, path: str, model: str) -> None:
    documents = ["the hat", {"text": "the cat"}, "东京"]
    answer = post(
        server, path, model=model, query="the cat", documents=documents, return_documents=True
    ).json()
    results = answer["results"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert sorted(each["index"] for each in results) == [0, 1, 2]
    texts = ["the hat", "the cat", "东京"]
    assert all(each["document"]["text"] == texts[each["index"]] for each in results)
    assert answer["usage"]["total_tokens"] > 0
    if model != "ranks":
        assert results[0]["index"] == 1
        assert scores[0] == pytest.approx(1, abs=1e-5)
    [best] = post(server, path, model=model, query="the cat", documents=documents, top_n=1).json()["results"]
    assert best["index"] == results[0]["index"]
    assert best["relevance_score"] == pytest.approx(scores[0], abs=1e-6)


def test_embeddings_models_are_listed_checked_tokenized_and_unloaded(server: Served) -> None:
    assert post(server, "/v1/embeddings", input="a", model="vectors").status_code == 200
    rows = {row["id"]: row for row in server.http.get("/v1/models").json()["data"]}
    assert (rows["vectors"]["kind"], rows["ranks"]["kind"]) == ("embedding", "reranker")
    assert [rows[name]["capabilities"] for name in ("vectors", "ranks")] == [["embeddings"], ["rerank"]]
    assert rows["vectors"]["context_length"] == 128
    assert server.http.post("/admin/workers/vectors/check").json()["ok"]
    assert post(server, "/tokenize", content="the cat", model="vectors").json()["tokens"][0] == encoders.CLS
    account = server.http.get("/admin/fit?model=vectors").json()
    assert account
    gone = post(server, "/v1/models/vectors/unload", wait=True)
    assert gone.status_code == 200
    assert post(server, "/v1/embeddings", input="a", model="vectors").status_code == 200


def test_embeddings_fall_back_to_no_model_of_another_kind(tmp_path: Path) -> None:
    encoders.write_case("bert", tmp_path / "data" / "models" / "vectors")
    flags = ("--fallback", "resident")
    with serving(write_case("llama_tied", tmp_path / "tiny"), tmp_path, *flags) as server:
        server.wait_state("ready")
        assert post(server, "/v1/embeddings", input="a", model="gone").status_code == 404
        assert post(server, "/v1/embeddings", input="a", model="vectors").status_code == 200
        answer = post(server, "/v1/embeddings", input="a", model="gone")
        assert (answer.headers["x-mlxd-fallback"], answer.json()["model"]) == ("vectors", "vectors")
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert post(server, "/v1/chat/completions", model="gone", **chat).headers["x-mlxd-fallback"] == "tiny"


def test_embeddings_swap_with_a_model_that_writes(tmp_path: Path) -> None:
    encoders.write_case("bert", tmp_path / "data" / "models" / "vectors")
    with serving(write_case("llama_tied", tmp_path / "tiny"), tmp_path, "--max-resident", "1") as server:
        chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        for _ in range(2):
            assert post(server, "/v1/embeddings", input="a", model="vectors").status_code == 200
            assert server.running()["vectors"]["phase"] == "ready"
            assert post(server, "/v1/chat/completions", model="tiny", **chat).status_code == 200
            assert "vectors" not in server.running() or server.running()["vectors"]["phase"] != "ready"
