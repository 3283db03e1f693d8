"""Schemas of tools that are none: what is wrong is told by its place."""

from typing import Any

import pytest

from tests.worker.callers import NOW, WEATHER
from tests.worker.text.calls import TOOLS
from worker.text.toolcalls.wellformed import fault_of


def test_schemas_that_are_right_have_no_fault() -> None:
    for schema in (WEATHER.parameters, NOW.parameters, *TOOLS.values(), {"items": [{"type": "null"}]}, True):
        assert fault_of(schema) == ""
    assert fault_of({"properties": {"type": {"type": "string"}, "required": {}, "minLength": True}}) == ""
    assert fault_of({"enum": [{"type": 5}], "default": {"required": 5}, "title": 5}) == ""


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"minLength": "x"}}}, "properties.a.minLength"),
        ({"properties": {"a": {"maxItems": -1}}}, "properties.a.maxItems"),
        ({"properties": {"a": {"minItems": True}}}, "properties.a.minItems"),
        ({"properties": {"a": 5}}, "properties.a"),
        ({"properties": []}, "properties"),
        ({"$defs": {"x": {"anyOf": {}}}}, "$defs.x.anyOf"),
        ({"anyOf": [{}, {"oneOf": [{}, 5]}]}, "anyOf[1].oneOf[1]"),
        ({"items": {"items": [5]}}, "items.items[0]"),
        ({"items": "x"}, "items"),
        ({"additionalProperties": {"pattern": 5}}, "additionalProperties.pattern"),
        ({"required": "a"}, "required"),
        ({"required": [5]}, "required"),
        ({"enum": "a"}, "enum"),
        ({"type": 5}, "type"),
        ({"type": ["string", "text"]}, "type"),
        ({"maximum": "5"}, "maximum"),
        ({"exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"not": {"$ref": 5}}, "not.$ref"),
        (5, "its beginning"),
    ],
)
def test_a_fault_is_told_by_its_place(schema: Any, place: str) -> None:
    assert f"at {place}: it must be" in fault_of(schema)
