"""Embeddings and rerank over a fake worker: asked again of the next one where it died under them."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.reading import score_of, vector_of
from tests.process.harness import Served, served

TEXTS = ["the cat", "東京", "a"]
ROUTES = ("/v1/embeddings", "/v1/rerank", "/api/embed")


def asked(server: Served, path: str) -> tuple[int, dict[str, Any]]:
    body = {"query": "q", "documents": TEXTS} if path == "/v1/rerank" else {"input": TEXTS}
    answer = server.http.post(path, json=body)
    told: dict[str, Any] = answer.json()
    return answer.status_code, told


def is_right(path: str, told: dict[str, Any]) -> bool:
    if path == "/v1/rerank":
        scores = {each["index"]: each["relevance_score"] for each in told["results"]}
        return scores == {place: score_of("q", text) for place, text in enumerate(TEXTS)}
    vectors = told["embeddings"] if path == "/api/embed" else [each["embedding"] for each in told["data"]]
    return bool(vectors == [vector_of(text) for text in TEXTS])


@pytest.mark.parametrize("path", ROUTES)
def test_embeddings_are_asked_again_where_the_worker_died_under_them(tmp_path: Path, path: str) -> None:
    with served(tmp_path, {"crash_after": 0}) as server:
        status, told = asked(server, path)
        assert status == 200, told
        assert is_right(path, told)
        assert len(server.journal("spawned")) == 2


def test_embeddings_that_kill_every_worker_are_given_up(tmp_path: Path) -> None:
    with served(tmp_path, {"crash_after": 0, "crash_times": 99}, restart_budget=20) as server:
        status, told = asked(server, "/v1/embeddings")
        assert (status, told["error"]["code"]) == (503, "engine_unavailable")
        assert "3 times" in told["error"]["message"]
        assert len(server.journal("spawned")) >= 3
