"""`tools` and `tool_choice` of chat completions, and what they were called before (`functions`). Pure."""

from typing import Any, NamedTuple

import msgspec

from parent.protocols import tools as offered
from parent.protocols.limits import shown
from parent.protocols.refusing import invalid, unsupported
from shared import wire


class FunctionField(msgspec.Struct, frozen=True, kw_only=True):
    """`tools[].function`, an entry of `functions`, and a tool of type `function` in Responses."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `tools`."""

    type: str = "function"
    function: FunctionField | None = None
    custom: Any = None


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`{"name": …}`."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    """`{"type": "function", "function": {"name": …}}`."""

    type: str = "function"
    function: NamedFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice.allowed_tools`."""

    mode: str
    tools: list[NamedTool]


class ChoiceField(msgspec.Struct, frozen=True, kw_only=True):
    """`tool_choice`, where it is an object."""

    type: str = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None
    custom: Any = None


class Offer(NamedTuple):
    """The tools of a request; `is_legacy`: as `functions`, and so is the answer."""

    tools: list[wire.Tool]
    choice: wire.ToolChoice
    is_legacy: bool = False


def offer(tools: list[ToolField] | None, choice: str | ChoiceField | None, *, parallel: bool | None) -> Offer:
    """What `tools`, `tool_choice` and `parallel_tool_calls` say. Raises `Refused` naming the field."""
    known = [_tool(each, f"tools[{index}]") for index, each in enumerate(tools or [])]
    offered.check_names(known, "tools")
    return Offer(*_chosen(known, choice, wire.ToolChoice(parallel=parallel is not False)))


def legacy_offer(functions: list[FunctionField], call: str | NamedFunction | None) -> Offer:
    """What `functions` and `function_call` say: at most one call. Raises `Refused`."""
    known = [_function(each, f"functions[{index}]") for index, each in enumerate(functions)]
    offered.check_names(known, "functions")
    one = wire.ToolChoice(parallel=False)
    if isinstance(call, NamedFunction):
        return Offer(known, offered.required(known, one, "function_call.name", call.name), True)
    if call == "none":
        return Offer([], wire.ToolChoice(), True)
    if call not in (None, "auto"):
        raise invalid("function_call", f"must be none, auto or an object with a name, not {shown(call)}")
    return Offer(known, one, True)


def _tool(given: ToolField, where: str) -> wire.Tool:
    if given.type != "function":
        raise unsupported(f"{where}.type", f"{shown(given.type)} is not supported: tools here are functions")
    if given.function is None:
        raise invalid(f"{where}.function", "must be an object with the function's name")
    return _function(given.function, f"{where}.function")


def _function(given: FunctionField, where: str) -> wire.Tool:
    return offered.tool(where, given.name, given.description, given.parameters, strict=bool(given.strict))


def _chosen(
    tools: list[wire.Tool], given: str | ChoiceField | None, choice: wire.ToolChoice
) -> tuple[list[wire.Tool], wire.ToolChoice]:
    if isinstance(given, ChoiceField):
        if given.type == "allowed_tools" and given.allowed_tools is not None:
            return _allowed(tools, given.allowed_tools, choice)
        if given.type != "function":
            raise unsupported("tool_choice", f"of type {shown(given.type)} is not supported")
        if given.function is None:
            raise invalid("tool_choice.function", "must be an object with the function's name")
        return tools, offered.required(tools, choice, "tool_choice.function.name", given.function.name)
    if given == "none":
        return [], wire.ToolChoice()
    if given == "required":
        return tools, offered.required(tools, choice, "tool_choice")
    if given not in (None, "auto"):
        raise invalid("tool_choice", f"must be none, auto, required or an object, not {shown(given)}")
    return tools, choice if tools else wire.ToolChoice()


def _allowed(
    tools: list[wire.Tool], given: AllowedTools, choice: wire.ToolChoice
) -> tuple[list[wire.Tool], wire.ToolChoice]:
    """The others are left out, so that the model does not know of them."""
    where = "tool_choice.allowed_tools"
    names = []
    for index, each in enumerate(given.tools):
        if each.function is None:
            raise invalid(f"{where}.tools[{index}].function", "must be an object with the function's name")
        names.append(each.function.name)
    kept = offered.choose(tools, set(names), f"{where}.tools")
    if given.mode == "required":
        return kept, offered.required(kept, choice, f"{where}.tools")
    if given.mode != "auto":
        raise invalid(f"{where}.mode", f"must be auto or required, not {shown(given.mode)}")
    return kept, choice if kept else wire.ToolChoice()


def modernise(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`function_call` and the role `function` of a history in the words that came after them."""
    modern, last = [], ""
    for index, message in enumerate(messages):
        call = message.get("function_call")
        if message.get("role") == "assistant" and call is not None and not message.get("tool_calls"):
            last = f"call_{index}"
            calls = [{"id": last, "type": "function", "function": call}]
            message = {key: value for key, value in message.items() if key != "function_call"}
            message["tool_calls"] = calls
        elif message.get("role") == "function":
            message = {**message, "role": "tool"} | ({"tool_call_id": last} if last else {})
        modern.append(message)
    return modern
