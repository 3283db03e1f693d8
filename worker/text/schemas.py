"""The schemas of tools, with a `type` at every node. Pure.

Templates print the type in capitals, or choose their words by it, and some fail where there is none.
"""

from typing import Any

MAX_DEPTH = 64
_ONE = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_MANY = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_KEPT = ("anyOf", "oneOf", "allOf")


def typed(schema: Any) -> dict[str, Any]:
    """A copy of the schema of a tool's parameters, an object whatever it says."""
    if not isinstance(schema, dict) or not schema:
        return {"type": "object", "properties": {}}
    if "type" not in schema and not any(key in schema for key in _KEPT):
        schema = {"type": "object", **schema}
    return _node(schema, schema, MAX_DEPTH)


def _node(node: dict[str, Any], root: dict[str, Any], levels: int) -> dict[str, Any]:
    if not levels:
        return node
    made = dict(node)
    for key in _ONE:
        if isinstance(node.get(key), dict):
            made[key] = _node(node[key], root, levels - 1)
    for key in _MANY:
        if isinstance(node.get(key), list):
            made[key] = [_node(n, root, levels - 1) if isinstance(n, dict) else n for n in node[key]]
    for key in _NAMED:
        if isinstance(node.get(key), dict):
            made[key] = {
                name: _node(n, root, levels - 1) if isinstance(n, dict) else n
                for name, n in node[key].items()
            }
    if isinstance(made.get("items"), list):  # of an old draft
        made["items"] = [_node(n, root, levels - 1) if isinstance(n, dict) else n for n in node["items"]]
    if "type" not in made and not any(key in made for key in _KEPT):
        made["type"] = _type_of(made, root, levels)
    return made


def _type_of(node: dict[str, Any], root: dict[str, Any], levels: int) -> Any:
    """What the values of a node without `type` are; "string" where nothing says."""
    if "$ref" in node:
        target = _target(node["$ref"], root)
        if target is None or not levels:
            return "object"
        return target.get("type") or _type_of(target, root, levels - 1)
    if "const" in node:
        return _name_of(node["const"])
    if isinstance(node.get("enum"), list) and node["enum"]:
        names = {_name_of(value) for value in node["enum"]} - {"null"}
        return names.pop() if len(names) == 1 else "string"
    if "properties" in node:
        return "object"
    return "array" if "items" in node or "prefixItems" in node else "string"


def _target(reference: Any, root: dict[str, Any]) -> dict[str, Any] | None:
    """The node of a `#/…` within the same schema."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    for step in reference[1:].split("/")[1:]:
        node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node if isinstance(node, dict) else None


def _name_of(value: Any) -> str:
    names = {
        bool: "boolean",
        int: "integer",
        float: "number",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names.get(type(value), "string")
