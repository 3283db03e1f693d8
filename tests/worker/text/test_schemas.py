"""Schemas of tools: every node has a type, whatever a client wrote."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.text.schemas import MAX_DEPTH, typed


def inner(schema, **root):
    """What becomes of a property with this schema."""
    return typed({"type": "object", "properties": {"p": schema}, **root})["properties"]["p"]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({}, "string"),
        ({"description": "what"}, "string"),
        ({"type": "integer"}, "integer"),
        ({"type": ["string", "null"]}, ["string", "null"]),
        ({"enum": ["a", "b"]}, "string"),
        ({"enum": [1, 2]}, "integer"),
        ({"enum": [1, None]}, "integer"),
        ({"enum": [1, "a"]}, "string"),
        ({"enum": []}, "string"),
        ({"const": 1.5}, "number"),
        ({"const": True}, "boolean"),
        ({"const": None}, "null"),
        ({"properties": {}}, "object"),
        ({"items": {}}, "array"),
        ({"prefixItems": [{}]}, "array"),
        ({"anyOf": [{}]}, None),
        ({"oneOf": [{}]}, None),
        ({"$ref": "#/$defs/node"}, "object"),
        ({"$ref": "#/$defs/number"}, "number"),
        ({"$ref": "#/$defs/words"}, "string"),
        ({"$ref": "#/$defs/itself"}, "object"),
        ({"$ref": "#/$defs/nowhere"}, "object"),
        ({"$ref": "http://elsewhere"}, "object"),
        ({"$ref": 5}, "object"),
    ],
)
def test_the_type_of_a_node(schema, kind):
    defs = {
        "node": {"properties": {"next": {"$ref": "#/$defs/node"}}},
        "number": {"type": "number"},
        "words": {"enum": ["a"]},
        "itself": {"$ref": "#/$defs/itself"},
    }
    found = inner(schema, **{"$defs": defs})
    assert found.get("type") == kind
    assert {key: found[key] for key in schema if key in ("enum", "const", "$ref")}.items() <= schema.items()


@pytest.mark.parametrize("schema", [{}, None, [], "x"])
def test_no_parameters_are_an_empty_object(schema):
    assert typed(schema) == {"type": "object", "properties": {}}


def test_every_place_of_a_schema_is_looked_at_and_the_request_is_left_alone():
    sent = {
        "properties": {"a": {"items": {"anyOf": [{}, {"additionalProperties": {}}]}}, "b": True},
        "$defs": {"c": {"not": {}}},
    }
    before = repr(sent)
    assert typed(sent) == {
        "type": "object",
        "properties": {
            "a": {
                "type": "array",
                "items": {
                    "anyOf": [{"type": "string"}, {"type": "string", "additionalProperties": {"type": "string"}}]
                },
            },
            "b": True,
        },
        "$defs": {"c": {"type": "string", "not": {"type": "string"}}},
    }  # fmt: skip
    assert repr(sent) == before


def test_a_schema_of_any_depth_is_no_recursion_without_end():
    schema = {}
    for _ in range(10 * MAX_DEPTH):
        schema = {"items": schema}
    assert typed(schema)["type"] == "object"


_SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["string", "#", "#/properties", "#/$defs/a"]),
    lambda value: (
        st.lists(value, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "items", "properties", "anyOf", "$ref", "$defs", "a", "enum", "const", "not"]
            ),
            value,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(_SCHEMAS)
def test_any_json_is_taken_for_a_schema(schema):
    assert "type" in typed(schema) or any(key in typed(schema) for key in ("anyOf", "oneOf", "allOf"))
