"""Embeddings and rerank over a fake worker: asked again of the next one where it died under them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.reading import score_of, vector_of
from tests.process.harness import Served, served, until
from tests.process.test_patience import connect, lines

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


@pytest.mark.parametrize(
    ("path", "kind"), [*zip(ROUTES, ("embeddings", "rerank", "embeddings"), strict=True)]
)
def test_every_request_has_one_line_in_the_log(tmp_path: Path, path: str, kind: str) -> None:
    with served(tmp_path, {}, {"slow": {"load_ms": 600_000}}) as server:
        server.wait_state("ready")
        status, _ = asked(server, path)
        assert status == 200
        body: dict[str, Any] = {"input": TEXTS, "query": "q", "documents": TEXTS}
        server.http.post(path, json={**body, "model": "nobody"})
        server.http.post(path, content=b"{")
        with connect(server) as leaving:  # the client leaves while the model is loaded
            sent = json.dumps({**body, "model": "slow"}).encode()
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(sent)}\r\n\r\n"
            leaving.sendall(head.encode() + sent)
            until(lambda: "slow" in server.running(), "the model is being loaded")
        logged = lines(server, count=4)
        told = [(line["model"], line["inputs"], line["end"], line["code"]) for line in logged]
        assert told == [
            ("org/fake-1b", 3, "done", None),
            ("", 3, "failed", "model_not_found"),
            ("", 0, "failed", "invalid_request"),
            ("slow", 3, "left", None),
        ]
        assert {line["kind"] for line in logged} == {kind}
        tokens = [line["prompt_tokens"] for line in logged]
        assert isinstance(tokens[0], int)
        assert tokens[0] > 0
        assert tokens[1:] == [None] * 3
        assert all(float(str(line["seconds"])) >= 0 for line in logged)
