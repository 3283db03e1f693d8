"""Arguments that a model writes one by one, as JSON by the schema of the tool, piece by piece.

What the schema types as a string is passed on as it comes and never read as anything else; other values wait until
they are whole.
"""

import json
from typing import Any

from worker.text.toolcalls.reader import Reader, Step

Schema = dict[str, Any]
Tools = dict[str, Schema]
"""The schemas of the arguments of a request's tools, by name."""

_MAX_REFS = 20
_WORDS = {"True": "true", "False": "false", "None": "null"}
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def resolve(schema: Any, root: Schema) -> Schema:
    """`schema`, or what its `$ref` names within `root`; what is no schema is an empty one."""
    for _ in range(_MAX_REFS):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str) or not ref.startswith("#"):
            break
        found: Any = root
        for part in ref.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        schema = found
    return schema if isinstance(schema, dict) and "$ref" not in schema else {}


def member(schema: Schema, name: str, root: Schema) -> Schema:
    """The schema of a property; empty: nothing is known of it."""
    properties = resolve(schema, root).get("properties")
    return resolve(properties.get(name), root) if isinstance(properties, dict) else {}


def kinds(schema: Any, root: Schema) -> frozenset[str]:
    """The JSON types that a value may have, as far as the schema says; empty: it does not say."""
    found: set[str] = set()
    waiting, seen = [schema], {}  # each schema is looked at once, however often another one names it
    while waiting:
        schema = resolve(waiting.pop(), root)
        if id(schema) in seen:
            continue
        seen[id(schema)] = schema
        named = schema.get("type")
        if isinstance(named, str):
            found.add(named)
        elif isinstance(named, list):
            found |= {one for one in named if isinstance(one, str)}
        elif isinstance(schema.get("enum"), list):
            found |= {kind_of(value) for value in schema["enum"]}
        elif "const" in schema:
            found.add(kind_of(schema["const"]))
        else:
            for key in ("anyOf", "oneOf"):
                waiting += schema[key] if isinstance(schema.get(key), list) else ()
        if schema.get("nullable") is True:
            found.add("null")
    return frozenset(found)


def kind_of(value: Any) -> str:
    """The JSON type of a Python value."""
    return _KINDS.get(type(value), "null")


def converted(raw: str, schema: Schema, root: Schema) -> str:
    """JSON for a value that was written without quotes: what its types allow, else a string."""
    wanted = kinds(schema, root)
    if wanted == {"string"}:
        return quoted(raw)
    text = raw.strip()
    text = _WORDS.get(text, text) if wanted & {"boolean", "null"} else text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(raw)
    kind = kind_of(value)
    fits = kind in wanted or (kind == "integer" and "number" in wanted)
    return quoted(raw) if "string" in wanted and not fits else text


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


class Arguments:
    """The arguments of one call under construction."""

    def __init__(self, reader: Reader, schema: Schema) -> None:
        self._reader = reader
        self._schema = schema
        self._separator = ""
        self._say("{")

    def _say(self, text: str) -> None:
        self._reader.say("arguments", text)

    def streams(self, name: str) -> bool:
        """Whether the value of `name` is a string, whatever it looks like."""
        return kinds(member(self._schema, name, self._schema), self._schema) == {"string"}

    def add(self, name: str, raw: str) -> None:
        """A value that is whole."""
        schema = member(self._schema, name, self._schema)
        self._key(name, converted(raw, schema, self._schema))

    def add_string(self, name: str, value: Step[Any]) -> Step[None]:
        """A string: `value` reads it and gives it out as text of kind `arguments`, which is quoted here."""
        self._key(name, '"')
        yield from quoting(self._reader, value)
        self._say('"')

    def close(self) -> None:
        self._say("}")
        self._reader.end()

    def _key(self, name: str, value: str) -> None:
        self._say(f"{self._separator}{quoted(name)}: {value}")
        self._separator = ", "


def quoting(reader: Reader, value: Step[Any]) -> Step[None]:
    """Run a step whose pieces of kind `arguments` are the content of a JSON string."""
    begun = len(reader.pieces)
    try:
        while True:
            try:
                next(value)
            except StopIteration:
                return
            finally:
                for place in range(begun, len(reader.pieces)):
                    kind, text = reader.pieces[place]
                    reader.pieces[place] = (kind, quoted(text)[1:-1])
            yield
            begun = 0
    finally:
        value.close()
