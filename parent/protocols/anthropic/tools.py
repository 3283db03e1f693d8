"""`tools` and `tool_choice` of Anthropic's format. Pure."""

from typing import Any

import msgspec

from parent.protocols import tools as offered
from parent.protocols.limits import shown
from parent.protocols.refusing import invalid, unsupported
from shared import wire

NOT_RUN = "server tools are not run here"


class ToolField(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    # known, and without any effect here
    cache_control: Any = None
    defer_loading: Any = None
    allowed_callers: Any = None
    input_examples: Any = None
    eager_input_streaming: Any = None


class ChoiceField(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


def offer(
    tools: list[ToolField] | None, choice: ChoiceField | None
) -> tuple[list[wire.Tool], wire.ToolChoice]:
    """What the model may call, and whether it has to. Raises `Refused` naming the field."""
    known = [_tool(each, f"tools[{index}]") for index, each in enumerate(tools or [])]
    offered.check_names(known, "tools")
    if choice is None:
        return known, wire.ToolChoice()
    given = wire.ToolChoice(parallel=not choice.disable_parallel_tool_use)
    if choice.type == "auto":
        return known, given if known else wire.ToolChoice()
    if choice.type == "none":
        return [], wire.ToolChoice()
    if choice.type == "any":
        return known, offered.required(known, given, "tool_choice")
    if choice.type == "tool":
        if not choice.name:
            raise invalid("tool_choice.name", "must be the name of the tool to use")
        return known, offered.required(known, given, "tool_choice.name", choice.name)
    raise invalid("tool_choice.type", f"must be auto, any, tool or none, not {shown(choice.type)}")


def _tool(given: ToolField, where: str) -> wire.Tool:
    """Whatever its type, a tool with a schema is a function; without one it would be run, or known, elsewhere."""
    if given.input_schema is None:
        if given.type not in (None, "custom"):
            raise unsupported(
                f"{where}.type",
                f"{shown(given.type)} is not supported: {NOT_RUN}; leave it out, or describe it with an "
                "input_schema and run it yourself",
            )
        raise invalid(f"{where}.input_schema", "must be there: the JSON schema of the tool's input")
    if given.name is None:
        raise invalid(f"{where}.name", "must be there: the name of the tool")
    return offered.tool(
        where,
        given.name,
        given.description,
        given.input_schema,
        strict=bool(given.strict),
        field="input_schema",
    )
