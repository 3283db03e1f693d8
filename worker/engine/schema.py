"""A JSON schema as llguidance takes it. Pure."""

from typing import Any

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Those of strings that are enforced; any other one says something to people only, as JSON Schema has it."""

_SCHEMAS = (
    "items",
    "additionalProperties",
    "anyOf",
    "oneOf",
    "allOf",
    "prefixItems",
    "not",
    "if",
    "then",
    "else",
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def enforceable(schema: Any) -> Any:
    """The same without the formats that nobody enforces; what is no schema stays as it is."""
    if isinstance(schema, list):
        return [enforceable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    if isinstance(made.get("format"), str) and made["format"] not in FORMATS:
        del made["format"]
    for key, value in made.items():
        if key in _SCHEMAS:
            made[key] = enforceable(value)
        elif key in _NAMED and isinstance(value, dict):
            made[key] = {name: enforceable(each) for name, each in value.items()}
    return made
