"""The OpenAPI 3.1 document of the table, its schemas made from the Structs that the routes decode and encode."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from parent.openapi.table import ERRORS, HTML, OPERATIONS, Operation
from shared.version import VERSION

_PARAMETER = re.compile(r"\{(\w+)\}")
JSON = "application/json"
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Needed where the server has keys; see `parent.keys`."""
SchemaOf = Callable[[Any], Any]


@cache
def document() -> bytes:
    """The document as JSON; made when it is first asked for."""
    return msgspec.json.encode(build())


@cache
def index() -> bytes:
    """`GET /v1`: what there is under it."""
    rows = [
        {"method": each.method, "path": each.path, "summary": each.summary}
        for each in OPERATIONS
        if each.path.startswith("/v1/")
    ]
    return msgspec.json.encode({"object": "index", "version": VERSION, "routes": rows})


def build() -> dict[str, Any]:
    """The document."""
    given = (each for op in OPERATIONS for each in (op.body, op.answer, ERRORS[op.errors]))
    types = sorted({each for one in given for each in _each(one)}, key=str)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    known = dict(zip(types, schemas, strict=True))

    def schema_of(of: Any) -> Any:
        found = [known[each] for each in _each(of)]
        return found[0] if len(found) == 1 else {"anyOf": found}

    paths: dict[str, dict[str, Any]] = {}
    for op in OPERATIONS:
        paths.setdefault(op.path, {})[op.method.lower()] = _operation(op, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "mlxd",
            "version": VERSION,
            "description": "Serves language models with MLX. docs/http.md says what each field means.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": SECURITY},
        "security": [{}, *({name: []} for name in SECURITY)],
        "tags": [{"name": name} for name in dict.fromkeys(op.tag for op in OPERATIONS)],
    }


def _each(of: Any) -> tuple[Any, ...]:
    """The types of a column: none, one or several."""
    return of if isinstance(of, tuple) else () if of is None else (of,)


def _operation(op: Operation, schema_of: SchemaOf) -> dict[str, Any]:
    words = [op.method.lower(), *re.findall(r"\w+", op.path)]
    found: dict[str, Any] = {
        "operationId": "_".join(words),
        "summary": op.summary,
        "tags": [op.tag],
        "responses": _responses(op, schema_of),
    }
    if parameters := _parameters(op):
        found["parameters"] = parameters
    if op.body is not None:
        content = {JSON: {"schema": schema_of(op.body)}}
        found["requestBody"] = {"required": op.needs_body, "content": content}
    return found


def _parameters(op: Operation) -> list[dict[str, Any]]:
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(op.path)
    ]
    return in_path + [
        {"name": each.name, "in": "query", "required": False, "schema": {"type": each.type}}
        for each in op.query
    ]


def _responses(op: Operation, schema_of: SchemaOf) -> dict[str, Any]:
    """Any failure has the one shape of its API."""
    content: dict[str, Any] = {}
    if op.answer is not None:
        content[JSON] = {"schema": schema_of(op.answer)}
    if op.stream:
        content[op.stream] = {"schema": {"type": "string"}}
    if not content:
        content[HTML if op.path == "/" else "*/*"] = {"schema": {"type": "string"}}
    good = {"description": op.summary, "content": content}
    wrong = {JSON: {"schema": schema_of(ERRORS[op.errors])}}
    error = {"description": "What is wrong, and what to do", "content": wrong}
    return {**{str(status): good for status in (op.status, *op.also)}, "default": error}
