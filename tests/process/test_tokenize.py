"""`/tokenize` and `/apply-template` over a fake worker: a model by name, loaded when it is needed, lost and back."""

from pathlib import Path
from typing import Any

import pytest

from tests.process.harness import served

MESSAGES = [{"role": "user", "content": "hi there"}]


def test_template_and_tokenize_load_the_model_that_is_named(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}) as server:
        shown = server.http.post("/apply-template", json={"messages": MESSAGES, "model": "b"})
        assert (shown.status_code, shown.json()) == (200, {"prompt": "user: hi there", "count": 3})
        assert server.running()["b"]["phase"] == "ready"
        assert server.running()["b"]["running"] == 0
        found = server.http.post("/tokenize", json={"content": "a b c d", "model": "b"}).json()
        assert (found["count"], len(found["tokens"]), found["max_model_len"]) == (4, 4, 4096)
        default = server.http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert default["count"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/tokenize", {"content": "x", "model": "nope"}, 404, "model_not_found"),
        ("/tokenize", {"content": 5}, 400, "invalid_request"),
        ("/detokenize", {"tokens": [-1]}, 400, "invalid_request"),
        ("/apply-template", {}, 400, "invalid_request"),
        ("/apply-template", [1], 400, "invalid_request"),
    ],
)
def test_tokenize_errors_have_the_shape_of_openai(
    tmp_path: Path, path: str, body: Any, status: int, code: str
) -> None:
    with served(tmp_path) as server:
        answer = server.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")


def test_tokenize_is_answered_by_the_worker_that_comes_after_one_that_died(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        first = server.http.post("/tokenize", json={"content": "a b"}).json()
        server.kill_worker()
        assert server.http.post("/tokenize", json={"content": "a b"}).json() == first
