"""Is the schema of a tool one? Grammars of calls are written from what its keywords hold. Pure."""

from collections.abc import Callable
from typing import Any

_TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_type(value: Any) -> bool:
    return all(one in _TYPES for one in (value if isinstance(value, list) else [value]))


_KINDS: list[tuple[str, Callable[[Any], bool], tuple[str, ...]]] = [
    ("a whole number of 0 or more", _is_count,
     ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")),
    ("a number", _is_number, ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")),
    ("a text", _is_text, ("pattern", "$ref")),
    ("a list of texts", _is_texts, ("required",)),
    ("a list", lambda value: isinstance(value, list), ("enum",)),
    ("the name of a type, or a list of them", _is_type, ("type",)),
]  # fmt: skip
_CHECKS = {key: (words, check) for words, check, keys in _KINDS for key in keys}
_ONE = ("items", "additionalProperties", "not", "if", "then", "else")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def fault_of(schema: Any) -> str:
    """What is wrong in it, and where; "" where nothing is."""
    waiting: list[tuple[str, Any]] = [("", schema)]
    while waiting:
        where, node = waiting.pop()
        if isinstance(node, bool):
            continue
        if not isinstance(node, dict):
            return f"its schema is none at {where or 'its beginning'}: it must be an object or a boolean"
        for key, value in node.items():
            place = f"{where}.{key}".lstrip(".")
            if key in _CHECKS and not _CHECKS[key][1](value):
                return f"its schema is none at {place}: it must be {_CHECKS[key][0]}"
            if key in _MANY or (key == "items" and isinstance(value, list)):  # of an old draft
                if not isinstance(value, list):
                    return f"its schema is none at {place}: it must be a list"
                waiting += [(f"{place}[{number}]", each) for number, each in enumerate(value)]
            elif key in _ONE:
                waiting.append((place, value))
            elif key in _NAMED:
                if not isinstance(value, dict):
                    return f"its schema is none at {place}: it must be an object"
                waiting += [(f"{place}.{name}", each) for name, each in value.items()]
    return ""
