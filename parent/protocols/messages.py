"""Chat messages of the OpenAI shape: are they such? Pure.

Only shapes are checked, and the field at fault is named. The form that chat templates expect is the worker's business
(`worker/text/messages.py`), which knows the template: here everything passes through as the client wrote it.
"""

from typing import Any

from parent.protocols.limits import MAX_DEPTH, MAX_MESSAGES, is_too_deep, shown
from parent.protocols.openai.fields import invalid, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_BE_EMPTY = ("assistant", "tool")


def checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages. Raises `Refused` naming the message and field at fault."""
    if not messages:
        raise invalid("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise invalid("messages", f"at most {MAX_MESSAGES} messages are possible, not {len(messages)}")
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]")
    return messages


def _check(message: dict[str, Any], where: str) -> None:
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    _check_content(message.get("content"), role, f"{where}.content")
    _check_calls(message.get("tool_calls"), f"{where}.tool_calls")
    if is_too_deep(message):
        raise invalid(where, f"objects and lists may stand {MAX_DEPTH} deep in each other, not more")


def _check_content(content: Any, role: str, where: str) -> None:
    if isinstance(content, list):
        for index, part in enumerate(content):
            _check_part(part, f"{where}[{index}]")
    elif content is None:
        if role not in _MAY_BE_EMPTY:
            raise invalid(where, f"must not be null or missing in a {role} message")
    elif not isinstance(content, str):
        raise invalid(where, f"must be a string or a list of parts, not {_kind(content)}")


def _check_part(part: Any, where: str) -> None:
    if isinstance(part, str):
        return
    if not isinstance(part, dict):
        raise invalid(where, f"must be an object, not {_kind(part)}")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise unsupported(f"{where}.type", f"{shown(kind)} is not supported: this model takes text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text", f"must be a string, not {_kind(text)}")


def _check_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise invalid(where, f"must be a list, not {_kind(calls)}")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(f"{where}[{index}]", "must be an object with function.name")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), "a number")
