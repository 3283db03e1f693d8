"""Chat messages of the OpenAI shape, checked and brought into the one form that templates expect. Pure.

Text parts become one string, `null` content of an assistant or tool becomes "", `developer` becomes `system`,
and the arguments of a past tool call become an object where they are one. Other keys pass through.
"""

from typing import Any

import msgspec

from parent.protocols.limits import MAX_DEPTH, MAX_MESSAGES, is_too_deep, shown
from parent.protocols.openai_fields import invalid, unsupported

ROLES = ("system", "user", "assistant", "tool")
_MAY_BE_EMPTY = ("assistant", "tool")


def normalise(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All messages. Raises `Refused` naming the message and field at fault."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"at most {MAX_MESSAGES} messages are possible, not {len(messages)}")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role == "developer":
        role = "system"
    if role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)} or developer, not {shown(role)}")
    known = {**message, "role": role, "content": _content(message.get("content"), role, f"{where}.content")}
    if message.get("tool_calls") is None:
        known.pop("tool_calls", None)
    else:
        known["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    if is_too_deep(known):
        raise invalid(where, f"objects and lists may stand {MAX_DEPTH} deep in each other, not more")
    return known


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role in _MAY_BE_EMPTY:
            return ""
        raise invalid(where, f"must not be null or missing in a {role} message")
    if not isinstance(content, list):
        raise invalid(where, f"must be a string or a list of parts, not {_kind(content)}")
    return "".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(where, f"must be an object, not {_kind(part)}")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise unsupported(f"{where}.type", f"{shown(kind)} is not supported: this model takes text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", f"must be a string, not {_kind(text)}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise invalid(where, f"must be a list, not {_kind(calls)}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(where, "must be an object with function.name")
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: Any) -> Any:
    """An object where it is one; what a model once wrote wrongly stays as it was."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
