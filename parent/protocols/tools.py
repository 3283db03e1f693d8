"""Functions that a client offers to the model, checked; whatever format they came by. Pure."""

import re
from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from parent.protocols.limits import MAX_DEPTH, is_too_deep, shown
from parent.protocols.refusing import invalid
from shared import wire

MAX_NAME = 128  # as Anthropic has it; those of OpenAI are half as long
_NAME = re.compile(rf"[a-zA-Z0-9_.-]{{1,{MAX_NAME}}}")


def tool(
    where: str,
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    *,
    strict: bool,
    field: str = "parameters",
) -> wire.Tool:
    """One function. `where` names its place in messages, `field` what its schema is called. Raises `Refused`."""
    check_name(name, where)
    schema = parameters or {}
    if schema.get("type", "object") != "object":
        raise invalid(
            f"{where}.{field}", f"must be a JSON schema of type 'object', not {shown(schema['type'])}"
        )
    if is_too_deep(schema):
        raise invalid(
            f"{where}.{field}", f"objects and lists may stand {MAX_DEPTH} deep in each other, not more"
        )
    return wire.Tool(name, description or "", schema, strict)


def check_name(name: str, where: str) -> None:
    """Raises `Refused` for what cannot be a name."""
    if not _NAME.fullmatch(name):
        raise invalid(
            f"{where}.name", f"must be 1 to {MAX_NAME} letters, digits, '_', '.' or '-', not {shown(name)}"
        )


def check_names(tools: list[wire.Tool], where: str | list[str]) -> None:
    """Raises `Refused` where two tools have one name. `where`: the list's name, or the place of each."""
    seen: set[str] = set()
    for index, each in enumerate(tools):
        if each.name in seen:
            place = f"{where}[{index}]" if isinstance(where, str) else where[index]
            raise invalid(place, f"there is a tool named {each.name!r} already")
        seen.add(each.name)


def choose(tools: list[wire.Tool], names: Collection[str], where: str) -> list[wire.Tool]:
    """The tools of these names. Raises `Refused` for a name that no tool has."""
    known = {each.name for each in tools}
    for name in names:
        if name not in known:
            raise invalid(where, f"there is no tool named {shown(name)} in this request")
    return [each for each in tools if each.name in names]


def required(tools: list[wire.Tool], choice: wire.ToolChoice, where: str, name: str = "") -> wire.ToolChoice:
    """`choice` made binding, for any tool or that of `name`. Raises `Refused`."""
    if not tools:
        raise invalid(where, "a call cannot be demanded without tools")
    if name:
        choose(tools, [name], where)
    return replace(choice, mode="required", name=name)
