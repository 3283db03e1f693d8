"""A real encoder over HTTP: its vectors are those of transformers, and they mean something."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.real import serving
from tests.process.harness import Served

pytestmark = pytest.mark.slow

REFERENCE = json.loads((Path(__file__).parent / "minilm_vectors.json").read_text())
"""Vectors of transformers 5.24 (float32), mean of the last states at unit length."""
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def server(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(minilm, tmp_path_factory.mktemp("minilm")) as running:
        running.wait_state("ready")
        yield running


@pytest.fixture
def sdk(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        yield client


def test_oracle_embeddings_of_a_real_model_in_one_group_and_alone(sdk: openai.OpenAI) -> None:
    together = sdk.embeddings.create(model="all-MiniLM-L6-v2", input=[case["text"] for case in REFERENCE])
    assert together.usage.prompt_tokens == sum(case["tokens"] for case in REFERENCE)
    for case, found in zip(REFERENCE, together.data, strict=True):
        alone = sdk.embeddings.create(model="all-MiniLM-L6-v2", input=case["text"]).data[0]
        for each in (found, alone):
            assert each.embedding == pytest.approx(case["vector"], abs=TOLERANCE)


def test_rerank_by_a_real_model_finds_the_answer(server: Served) -> None:
    documents = ["Cats sleep most of the day.", "Berlin is in Germany.", "The capital of France is Paris."]
    body = {"query": "What is the capital of France?", "documents": documents, "top_n": 1}
    [best] = server.http.post("/v1/rerank", json=body).json()["results"]
    assert best["index"] == 2
    assert best["relevance_score"] > 0.7


def test_embeddings_of_many_long_texts_stay_within_what_the_ledger_reserved(
    server: Served, sdk: openai.OpenAI
) -> None:
    texts = [f"{number} cats sleep for most of the day. " * (1 + number % 20) for number in range(60)]
    found = sdk.embeddings.create(model="all-MiniLM-L6-v2", input=texts, dimensions=64)
    assert [len(each.embedding) for each in found.data] == [64] * 60
    [account] = server.ledger()["accounts"].values()
    grant = account["grant"]
    stats = server.engine()["stats"]
    assert stats["peak_bytes"] - grant["weights"] < grant["transient"]
    assert (grant["kv"], grant["prefix"]) == (0, 0)
