"""`tools` and `tool_choice` of the Responses API: functions and tools that take free text, also in namespaces. Pure.

The model knows a tool of a namespace by one name for both; calls tell them apart again. Tools that run at OpenAI
(search, MCP, shells, …) are left out, and told: clients send them by default.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from parent.protocols import tools as offered
from parent.protocols.limits import MAX_DEPTH, is_too_deep, shown
from parent.protocols.openai.tools import FunctionField
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.responses.custom import PARAMETERS
from shared import wire

Field = dict[str, Any]


class FormatField(msgspec.Struct, frozen=True, kw_only=True):
    """`format` of a custom tool: the model is told of a grammar, and not held to it."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None


class CustomField(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of type `custom`."""

    name: str
    description: str | None = None
    format: FormatField | None = None


class NamespaceField(msgspec.Struct, frozen=True, kw_only=True):
    """A tool of type `namespace`: the tools of one server, say."""

    name: str
    description: str | None = None
    tools: list[Field]


class Offer(NamedTuple):
    """`shown`: the tools as a response repeats them; `custom`: names of those that take text; `namespaced`: names of
    those in namespaces, to where they stand; `ignored`: types.
    """

    tools: list[wire.Tool]
    choice: wire.ToolChoice
    custom: frozenset[str]
    namespaced: dict[str, tuple[str, str]]
    shown: list[Field]
    ignored: list[str]


class Leaf(NamedTuple):
    """A function or custom tool as it was sent. `told`: the list in which the response repeats it."""

    given: Field
    where: str
    namespace: str | None
    told: list[Field]


def offer(tools: list[Field] | None, choice: str | Field | None, *, parallel: bool) -> Offer:
    """What `tools`, `tool_choice` and `parallel_tool_calls` say. Raises `Refused` naming the field."""
    known: list[wire.Tool] = []
    places: list[str] = []
    custom: set[str] = set()
    namespaced: dict[str, tuple[str, str]] = {}
    told: list[Field] = []
    ignored: list[str] = []
    for given, where, namespace, into in _leaves(tools or [], told):
        kind = given.get("type")
        if kind not in ("function", "custom"):
            if not isinstance(kind, str):
                raise invalid(f"{where}.type", f"must be a string, not {shown(kind)}")
            if kind not in ignored:
                ignored.append(kind)
            continue
        tool, field = _function(given, where) if kind == "function" else _custom(given, where)
        into.append(field)
        if namespace is not None:
            name = qualified(namespace, tool.name)
            offered.check_name(name, where)
            namespaced[name] = namespace, tool.name
            tool = replace(tool, name=name)
        if kind == "custom":
            custom.add(tool.name)
        known.append(tool)
        places.append(where)
    offered.check_names(known, places)
    wanted = wire.ToolChoice(parallel=parallel)
    return Offer(*_chosen(known, choice, wanted), frozenset(custom), namespaced, told, ignored)


def qualified(namespace: str | None, name: str) -> str:
    """The one name that the model knows a tool by."""
    if namespace is None:
        return name
    return namespace + ("" if namespace.endswith("__") else "__") + name


def _leaves(tools: list[Field], told: list[Field]) -> Iterator[Leaf]:
    """The tools one by one, those of namespaces too."""
    for index, given in enumerate(tools):
        where = f"tools[{index}]"
        if given.get("type") != "namespace":
            yield Leaf(given, where, None, told)
            continue
        group = _converted(given, NamespaceField, where)
        inner: list[Field] = []
        told.append(
            {"type": "namespace", "name": group.name, "description": group.description, "tools": inner}
        )
        for place, each in enumerate(group.tools):
            yield Leaf(each, f"{where}.tools[{place}]", group.name, inner)


def _function(given: Field, where: str) -> tuple[wire.Tool, Field]:
    inner = given.get("function")
    if isinstance(inner, dict) and "name" not in given:  # as in chats
        given, where = inner, f"{where}.function"
    field = _converted(given, FunctionField, where)
    tool = offered.tool(where, field.name, field.description, field.parameters, strict=bool(field.strict))
    return tool, {
        "type": "function",
        "name": field.name,
        "description": field.description,
        "parameters": field.parameters,
        "strict": bool(field.strict),
    }


def _custom(given: Field, where: str) -> tuple[wire.Tool, Field]:
    field = _converted(given, CustomField, where)
    told = field.description or ""
    form = field.format or FormatField()
    if form.type == "grammar":
        if not form.definition:
            raise invalid(f"{where}.format.definition", "must be the text of the grammar")
        told += f"\n\nThe input has to fit this grammar ({form.syntax or 'lark'}):\n{form.definition}"
    elif form.type != "text":
        raise unsupported(f"{where}.format.type", f"{shown(form.type)} is not supported")
    tool = offered.tool(where, field.name, told.strip(), PARAMETERS, strict=False)
    format_field: Field = {"type": form.type}
    if form.type == "grammar":
        format_field |= {"syntax": form.syntax or "lark", "definition": form.definition}
    return tool, {
        "type": "custom",
        "name": field.name,
        "description": field.description,
        "format": format_field,
    }


def _converted(given: Field, kind: type[Any], where: str) -> Any:
    if is_too_deep(given):
        raise invalid(where, f"objects and lists may stand {MAX_DEPTH} deep in each other, not more")
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        what, _, field = str(error).partition(" - at `$")
        raise invalid(where + field.rstrip("`").partition("[...]")[0], what) from None


def _chosen(
    tools: list[wire.Tool], given: str | Field | None, choice: wire.ToolChoice
) -> tuple[list[wire.Tool], wire.ToolChoice]:
    if isinstance(given, dict):
        kind = given.get("type")
        if kind == "allowed_tools":
            return _allowed(tools, given, choice)
        if kind not in ("function", "custom"):
            raise unsupported(
                "tool_choice", f"of type {shown(kind)} is not supported: such tools do not run here"
            )
        return tools, offered.required(tools, choice, "tool_choice.name", _name(given, "tool_choice"))
    if given == "none":
        return [], wire.ToolChoice()
    if given == "required":
        return tools, offered.required(tools, choice, "tool_choice")
    if given not in (None, "auto"):
        raise invalid("tool_choice", f"must be none, auto, required or an object, not {shown(given)}")
    return tools, choice if tools else wire.ToolChoice()


def _allowed(
    tools: list[wire.Tool], given: Field, choice: wire.ToolChoice
) -> tuple[list[wire.Tool], wire.ToolChoice]:
    """The others are left out, so that the model does not know of them."""
    where, mode, listed = "tool_choice.tools", given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("tool_choice.mode", f"must be auto or required, not {shown(mode)}")
    if not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
        raise invalid(where, "must be a list of tools")
    names = [
        _name(each, f"{where}[{index}]")
        for index, each in enumerate(listed)
        if each.get("type", "function") in ("function", "custom")
    ]
    kept = offered.choose(tools, set(names), where)
    if mode == "required":
        return kept, offered.required(kept, choice, where)
    return kept, choice if kept else wire.ToolChoice()


def _name(given: Field, where: str) -> str:
    inner = given.get("function")
    name = (inner if isinstance(inner, dict) and "name" not in given else given).get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", "must be the name of a tool")
    namespace = given.get("namespace")
    return qualified(namespace if isinstance(namespace, str) else None, name)
