"""Schemathesis asks whatever the OpenAPI document allows: no request is a fault, and every answer is as it says there.

Against a real worker on a tiny model. Bounded, and the same requests each time.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from parent.openapi.document import build
from tests.e2e.real import serving
from tests.oracles.checkpoints import write_case
from tests.process.harness import Served

EXAMPLES = 6
LONGEST_S = 20.0
NAME = "tiny"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
LEFT_OUT = {
    "GET /admin/events",  # has no end
    "PATCH /admin/config",  # would change the server under the tests
    "POST /admin/restart",
    "POST /admin/pulls",  # of the network
    "POST /api/pull",
    "POST /api/quantize/push",
    "POST /api/finetune/push",
    "POST /api/dataset/push",
    "POST /api/evaluations",  # runs a job each time
    "POST /api/gc/execute",
    "GET /ready",  # 503 is what it is for
    "POST /admin/workers/{id}/check",
    "POST /api/create",  # 501 is all that they say
    "POST /api/copy",
    "POST /api/push",
    "DELETE /api/delete",
}

USER = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "POST /v1/chat/completions": {"messages": USER, "max_tokens": 3},
    "POST /v1/completions": {"prompt": "hi", "max_tokens": 3},
    "POST /v1/responses": {"input": "hi", "max_output_tokens": 3},
    "POST /v1/responses/input_tokens": {"input": "hi"},
    "POST /v1/messages": {"messages": USER, "max_tokens": 3},
    "POST /v1/messages/count_tokens": {"messages": USER},
    "POST /v1/embeddings": {"input": ["hi", "there"]},
    "POST /v1/rerank": {"query": "hi", "documents": ["a", "b"]},
    "POST /api/chat": {"messages": USER, "options": {"num_predict": 3}, "stream": False},
    "POST /api/generate": {"prompt": "hi", "options": {"num_predict": 3}, "stream": False},
    "POST /api/embed": {"input": "hi"},
    "POST /api/embeddings": {"prompt": "hi"},
    "POST /api/show": {"model": NAME},
    "POST /tokenize": {"content": "hi"},
    "POST /detokenize": {"tokens": [1, 2]},
    "POST /apply-template": {"messages": USER},
    "POST /v1/models/{id}/load": {"wait": True},
}
"""Bodies that are answered, to which fields are added that the document allows."""


def operations() -> dict[str, Any]:
    """Those that are asked, by method and path."""
    found = schemathesis.openapi.from_dict(build()).get_all_operations()
    return {label: operation for each in found if (label := (operation := each.ok()).label) not in LEFT_OUT}


OPERATIONS = operations()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model_dir = write_case("llama_tied", tmp_path_factory.mktemp("real") / NAME)
    with serving(model_dir, tmp_path_factory.mktemp("served")) as server:
        server.wait_state("ready")
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("label", list(OPERATIONS))
def test_openapi_says_what_is_answered(server: Served, label: str) -> None:
    operation = OPERATIONS[label]

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def ask(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body.pop("model", None)  # nobody guesses a name: the default model is meant
        if "models/" in label or "workers/" in label:
            case.path_parameters["id"] = NAME
        check(case, server)
        if label in GOOD and isinstance(case.body, dict):
            drawn = [(name, value) for name, value in case.body.items() if name not in GOOD[label]]
            for name, value in drawn[:2]:
                case.body = GOOD[label] | {name: value}
                check(case, server)

    ask()


def check(case: Any, server: Served) -> None:
    response = case.call(base_url=server.url, timeout=LONGEST_S)
    comes_again = response.status_code == 503 and "retry-after" in response.headers
    checks = [each for each in CHECKS if each is not not_a_server_error or not comes_again]
    case.validate_response(response, checks=checks)  # another operation may just have unloaded the model


@pytest.mark.slow
@pytest.mark.parametrize("label", list(GOOD))
def test_openapi_describes_a_good_answer(server: Served, label: str) -> None:
    names = {"id": NAME} if "{id}" in label else {}
    case = OPERATIONS[label].Case(body=GOOD[label], path_parameters=names, media_type="application/json")
    response = case.call(base_url=server.url, timeout=LONGEST_S)
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=CHECKS)


def test_what_openapi_conformance_leaves_out_exists() -> None:
    found = schemathesis.openapi.from_dict(build()).get_all_operations()
    assert {each.ok().label for each in found} >= LEFT_OUT
