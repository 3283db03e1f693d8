"""The OpenAPI document: every route and no other, and nothing in it that leads nowhere."""

import json
import re
from collections.abc import Iterator
from typing import Any

from parent.openapi.document import document, index
from parent.openapi.table import OPERATIONS
from tests.test_docs import routes

DOCUMENT = json.loads(document())


def test_openapi_has_every_route_and_no_other() -> None:
    listed = [(op.method, op.path) for op in OPERATIONS]
    assert sorted(listed) == sorted(routes())
    found = {(method.upper(), path) for path, item in DOCUMENT["paths"].items() for method in item}
    assert found == set(listed)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for inner in value.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_openapi_references_lead_somewhere_and_nothing_is_left_over() -> None:
    known = {f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]}
    assert set(references(DOCUMENT)) == known


def test_openapi_names_each_operation_once_and_describes_its_parameters() -> None:
    operations = [(path, op) for path, item in DOCUMENT["paths"].items() for op in item.values()]
    ids = [op["operationId"] for _, op in operations]
    assert len(set(ids)) == len(ids)
    for path, op in operations:
        named = [each["name"] for each in op.get("parameters", []) if each["in"] == "path"]
        assert named == re.findall(r"\{(\w+)\}", path)
        assert "default" in op["responses"]


def test_openapi_knows_the_fields_of_a_body() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    body = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    name = body["schema"]["$ref"].rpartition("/")[2]
    assert {"messages", "temperature", "tools", "response_format"} <= set(schemas[name]["properties"])
    assert schemas[name]["required"] == ["messages"]


def test_the_openapi_index_lists_what_is_under_v1() -> None:
    paths = {row["path"] for row in json.loads(index())["routes"]}
    assert {"/v1/models", "/v1/chat/completions", "/v1/messages"} <= paths
    assert all(path.startswith("/v1/") for path in paths)
