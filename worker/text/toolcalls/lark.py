"""Grammars of calls, in llguidance's Lark: what the formats write them with.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

import json
from collections.abc import Callable
from typing import Any

from worker.text.toolcalls.arguments import Schema, kind_of, quoted, resolve

ANY = "(?s:.*)"
_DENSE = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}  # as templates write JSON
_MAX_DEPTH = 40
_MAX_VALUES = 10_000
_NUMBERS = ("type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Unwritable(Exception):
    """What the schema of a tool asks for has no form in the model's format; the reason in a few words."""


class Rules:
    """Rules under construction, and the marks that are tokens of their own."""

    def __init__(self, special: Callable[[str], str]) -> None:
        """`special`: a mark -> how Lark names its token; "" = it is text."""
        self._special = special
        self.lines: list[str] = []
        self.values = 0  # how many have been written out in place

    def mark(self, text: str) -> str:
        return self._special(text) or quoted(text)

    def text(self, text: str) -> str:
        return quoted(text) if text else ""

    def rule(self, body: str, options: str = "") -> str:
        """A rule of its own -> its name."""
        name = self.name()
        self.define(name, body, options)
        return name

    def name(self) -> str:
        self.lines.append("")
        return f"r{len(self.lines)}"

    def define(self, name: str, body: str, options: str = "") -> None:
        self.lines[int(name[1:]) - 1] = f"{name}{options}: {body}"

    def upto(self, mark: str, pattern: str = ANY) -> str:
        """Text of some form, and the mark that ends it."""
        escaped = pattern.replace("/", r"\/")
        if token := self._special(mark):
            return f"/{escaped}/ {token}"
        return self.rule(f"/{escaped}/", f"[suffix={quoted(mark)}]")

    def json(self, schema: Schema) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": _DENSE})


def object_of(schema: Schema) -> Schema:
    """The schema of a tool's arguments, which are an object whatever it says."""
    return {**schema, "type": "object"}


def part_of(schema: Schema, root: Schema) -> Schema:
    """A schema from within another, with what it may refer to."""
    return {**schema, **{key: root[key] for key in ("$defs", "definitions") if key in root}}


def options_of(schema: Schema) -> list[Schema] | None:
    """The schemas of which a value fits one or another; None: there is only this."""
    if isinstance(schema.get("type"), list):
        return [{**schema, "type": kind} for kind in schema["type"]]
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list) and "type" not in schema:
            return list(schema[key])
    return None


def values_of(schema: Schema) -> list[Any] | None:
    """The values that are allowed, where they are listed."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def pattern_of(schema: Schema) -> str:
    """The form of a string as a regular expression; `format` is only a remark."""
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    pattern = schema.get("pattern")
    if not isinstance(pattern, str):
        return ANY if not least and most is None else f"(?s:.{{{least},{'' if most is None else int(most)}}})"
    if least or most is not None:
        raise Unwritable("a string cannot have both a pattern and a length")
    begin = "" if pattern.startswith("^") else ANY
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else ANY
    return f"{begin}({pattern.removeprefix('^').removesuffix('$' if not end else '')}){end}"


def raw_value(
    rules: Rules, schema: Any, root: Schema, string: Callable[[str], str], end: str, depth: int = 0
) -> str:
    """A value without quotes and the mark `end`: a string as it is (`string` of its pattern), others as JSON."""
    rules.values += 1
    if depth > _MAX_DEPTH or rules.values > _MAX_VALUES:
        raise Unwritable("there is no end to the alternatives of its schema")
    schema = resolve(schema, root)
    values = values_of(schema)
    if values is not None:
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        return f"({' | '.join(quoted(text) for text in texts)}) {rules.mark(end)}"
    if (options := options_of(schema)) is not None:
        each = (raw_value(rules, one, root, string, end, depth + 1) for one in options)
        return f"({' | '.join(each)})"
    if schema.get("type", "string") == "string":
        return string(pattern_of(schema))
    return f"{rules.json(part_of(schema, root))} {rules.mark(end)}"


def parameters(rules: Rules, schema: Schema, one: Callable[[str, Any], str]) -> str:
    """The arguments of a tool in the order of its schema, those that are not required or not: `one` for each."""
    properties = schema.get("properties")
    required = schema.get("required") or ()
    found = []
    for name, inner in properties.items() if isinstance(properties, dict) else ():
        body = rules.rule(one(name, inner))
        found.append(body if name in required else f"{body}?")
    missing = [name for name in required if name not in (properties or {})]
    if missing:
        raise Unwritable(f"it requires {missing[0]!r}, which is not among its properties")
    return " ".join(found)


class Literals:
    """How a format writes values that are neither JSON nor bare text: `string` (of a pattern's schema) and the rest."""

    def __init__(
        self,
        rules: Rules,
        string: Callable[[Schema], str],
        literal: Callable[[Any], str],
        key: Callable[[str], str],
        comma: str,
    ) -> None:
        self._rules = rules
        self._string = string
        self._literal = literal  # of a string, a boolean or None
        self._key = key  # of a nested object
        self._comma = quoted(comma)
        self._known: dict[int, str] = {}  # schemas by identity: one may hold itself
        self._any = ""

    def value(self, schema: Any, root: Schema, depth: int = 0) -> str:
        if isinstance(schema, bool) or depth > _MAX_DEPTH:
            return self.anything()
        schema = resolve(schema, root)
        known = self._known.get(id(schema))
        if known is None:
            known = self._known[id(schema)] = self._rules.name()
            self._rules.define(known, self._body(schema, root, depth + 1))
        return known

    def _body(self, schema: Schema, root: Schema, depth: int) -> str:
        if (values := values_of(schema)) is not None:
            return " | ".join(map(self._constant, values))
        if (options := options_of(schema)) is not None:
            return " | ".join(self.value(one, root, depth) for one in options)
        match schema.get("type", "object" if "properties" in schema else None):
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return self._rules.json({key: schema[key] for key in _NUMBERS if key in schema})
            case "boolean":
                return f"{self._literal(True)} | {self._literal(False)}"
            case "null":
                return self._literal(None)
            case "array":
                return self._list(schema, root, depth)
            case "object":
                if not schema.get("properties"):
                    return self._free_object()
                return f'"{{" {self.members(schema, root, self._key, depth)} "}}"'
        return self.anything()

    def _list(self, schema: Schema, root: Schema, depth: int) -> str:
        item = self.value(schema.get("items", True), root, depth)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        more = f"{{{max(0, least - 1)},{'' if most is None else int(most) - 1}}}"
        some = f"{item} ({self._comma} {item}){more}"
        return f'"[" {some} "]"' if least else f'"[" ({some})? "]"'

    def _constant(self, value: Any) -> str:
        if isinstance(value, dict):
            entries = [f"{self._key(key)} {self._constant(inner)}" for key, inner in value.items()]
            return f'"{{" {f" {self._comma} ".join(entries)} "}}"'
        if isinstance(value, list):
            return f'"[" {f" {self._comma} ".join(map(self._constant, value))} "]"'
        return quoted(json.dumps(value)) if kind_of(value) in ("integer", "number") else self._literal(value)

    def anything(self) -> str:
        if not self._any:
            self._any = self._rules.name()
            each = [self._string({}), self._literal(True), self._literal(False), self._literal(None)]
            number = self._rules.json({"type": "number"})
            items = f'"[" ({self._any} ({self._comma} {self._any})*)? "]"'
            self._rules.define(self._any, " | ".join([*each, number, items, self._free_object()]))
        return self._any

    def _free_object(self) -> str:
        entry = f'/[A-Za-z_][A-Za-z0-9_]*/ ":" {self.anything()}'
        if self._key("a") != quoted("a:"):
            entry = f'{self._string({})} ":" {self.anything()}'
        return f'"{{" ({entry} ({self._comma} {entry})*)? "}}"'

    def members(self, schema: Schema, root: Schema, key: Callable[[str], str], depth: int = 0) -> str:
        """The properties of an object in their order, with commas between those that are there."""
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        missing = [name for name in required if name not in properties]
        if missing:
            raise Unwritable(f"it requires {missing[0]!r}, which is not among its properties")
        after = ""  # what may follow once something is there
        first = ""  # the same while nothing is
        for name, inner in reversed(properties.items()):
            entry = self._rules.rule(f"{key(name)} {self.value(inner, root, depth)}")
            here = f"{entry} {after}".strip()
            if name in required:
                first = here
                step = f"{self._comma} {entry}"
            else:
                first = f"({here} | {first})" if first else f"({here})?"
                step = f"({self._comma} {entry})?"
            after = self._rules.rule(f"{step} {after}".strip())
        return first
