"""What an answer has to be: `response_format` and the names that other servers have for the same. Pure.

There is one way to say it in a request; two that say the same are fine, two that do not are refused.
"""

from typing import Any

import msgspec

from parent.protocols.limits import MAX_DEPTH, is_too_deep, shown
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.sampling import SamplingFields
from shared import wire

Schema = dict[str, Any] | bool
MAX_OPTIONS = 10_000


class SchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`. It is always enforced, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`; `schema` beside `json_object` is llama.cpp's."""

    type: str
    json_schema: SchemaFormat | None = None
    schema: Schema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """`structured_outputs` of vLLM."""

    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None


class StructuredFields(SamplingFields, frozen=True, kw_only=True):
    """The fields that say it, after those of sampling."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: Schema | None = None


def grammar(body: StructuredFields) -> wire.Grammar | None:
    """The one grammar that a body asks for. Raises `Refused`."""
    found = [
        *_of_format(body.response_format),
        *_of_outputs(body.structured_outputs),
        *_of(json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice,
             grammar=body.guided_grammar, prefix="guided_"),
        *_of(grammar=body.grammar, json=body.json_schema, prefix="", json_name="json_schema"),
    ]  # fmt: skip
    for name, other in found[1:]:
        if other != found[0][1]:
            raise invalid(name, f"asks for another form of the answer than {found[0][0]}; give one of them")
    return found[0][1] if found else None


def json_schema(schema: Schema, where: str) -> wire.JsonSchema:
    """A grammar of a schema. Raises `Refused` where it is nested too deep to be carried."""
    if is_too_deep(schema):
        raise invalid(where, f"objects and lists may stand {MAX_DEPTH} deep in each other, not more")
    return wire.JsonSchema(schema)


Found = list[tuple[str, wire.Grammar]]


def _of_format(given: ResponseFormat | None) -> Found:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        if given.schema is None:
            return [("response_format", wire.JsonObject())]
        return [("response_format", json_schema(given.schema, "response_format.schema"))]
    if given.type != "json_schema":
        raise unsupported("response_format", f"of type {shown(given.type)} is not supported")
    if given.json_schema is None:
        raise invalid("response_format.json_schema", "must be an object with the schema")
    if given.json_schema.schema is None:
        return [("response_format", wire.JsonObject())]
    return [("response_format", json_schema(given.json_schema.schema, "response_format.json_schema.schema"))]


def _of_outputs(given: StructuredOutputs | None) -> Found:
    if given is None:
        return []
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(given, name) is not None:
            raise unsupported(f"structured_outputs.{name}")
    found = _of(
        json=given.json,
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        prefix="structured_outputs.",
    )
    if given.json_object:
        found.append(("structured_outputs.json_object", wire.JsonObject()))
    return found


def _of(
    *,
    prefix: str,
    json: Schema | str | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    json_name: str = "json",
) -> Found:
    found: Found = []
    if json is not None:
        where = prefix + json_name
        found.append((where, json_schema(_parsed(json, where), where)))
    if regex is not None:
        found.append((f"{prefix}regex", wire.Regex(regex)))
    if choice is not None:
        if not 0 < len(choice) <= MAX_OPTIONS:
            raise invalid(f"{prefix}choice", f"must be a list of 1 to {MAX_OPTIONS} texts")
        found.append((f"{prefix}choice", wire.Choice(choice)))
    if grammar is not None:
        found.append((f"{prefix}grammar", wire.ContextFree(grammar)))
    return found


def _parsed(schema: Schema | str, where: str) -> Schema:
    """A schema, also where it is sent as JSON text."""
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema, type=Schema)
    except (msgspec.MsgspecError, RecursionError):
        raise invalid(where, "is no JSON schema: its text is not a JSON object") from None
