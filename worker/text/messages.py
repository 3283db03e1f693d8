"""Messages as clients write them to messages as chat templates expect them.

Text parts are joined to one string (templates for text models print a list as it is, or lose it), null content
is empty text, and the arguments of a tool call in the history are an object where they parse to one.
"""

import json
from typing import Any

Messages = list[dict[str, Any]]


def normalise(messages: Messages) -> Messages:
    """A copy in the shape of templates; the order and the roles are left alone."""
    return [_message(message) for message in messages]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    changed = {**message, "content": _content(message.get("content"))}
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        changed["tool_calls"] = [_call(call) if isinstance(call, dict) else call for call in calls]
    return changed


def _content(content: Any) -> Any:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = [_part_text(part) for part in content]
    return "".join(text for text in texts if text is not None) if None not in texts else content


def _part_text(part: Any) -> str | None:
    """The text of a text part; None for anything else."""
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        text = part.get("text")
        return text if isinstance(text, str) else None
    return None


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    raw = function["arguments"]
    try:
        arguments = json.loads(raw) if raw.strip() else {}
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
