"""Messages as protocols give them to messages as chat templates read them: the form, not the order.

The internal form is OpenAI's chat shape. Text parts are joined to one string (templates for text models print a list
as it is, or lose it), null content is empty text, `developer` is `system`, the arguments of a call are an object where
they parse to one, and what was thought is `reasoning_content`. Keys that say nothing go; others pass through.
"""

import re
from functools import lru_cache
from typing import Any, Literal

import msgspec

Message = dict[str, Any]
Messages = list[Message]
Style = Literal["reasoning_content", "reasoning", "thinking", "blocks"]

_TEXT_OF = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_READS: dict[Style, re.Pattern[str]] = {
    "blocks": re.compile(r"""type['"]?\]?\s*==\s*['"]thinking"""),
    "thinking": re.compile(r"""message(\.|\[['"])thinking"""),
    "reasoning": re.compile(r"""message(\.|\[['"]|\.get\(['"])reasoning\b(?!_)"""),
}


def normalise(messages: Messages) -> Messages:
    """A copy in the shape of templates; number, order and roles of the messages stay."""
    return [_message(message) for message in messages]


def has_calls(message: Message) -> bool:
    """Whether it calls tools; of a message in form."""
    return "tool_calls" in message


@lru_cache(maxsize=8)
def thought_style(source: str) -> Style:
    """Where a template looks for what an assistant thought."""
    if "reasoning_content" in source:
        return "reasoning_content"
    return next((style for style, reads in _READS.items() if reads.search(source)), "reasoning_content")


def voiced(message: Message, style: Style) -> Message:
    """The thoughts of a message in form where a template of this style looks for them."""
    thought = message.get("reasoning_content")
    if style == "reasoning_content" or not thought:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    if style != "blocks":
        return {**rest, style: thought}
    content = rest["content"]
    said = [{"type": "text", "text": content}] if isinstance(content, str) and content else content or []
    return {**rest, "content": [{"type": "thinking", "thinking": thought}, *said]}


def _message(message: Message) -> Message:
    changed = {key: value for key, value in message.items() if value is not None and key not in _THOUGHTS}
    changed["content"] = _content(message.get("content"))
    if changed.get("role") == "developer":
        changed["role"] = "system"
    for key in _THOUGHTS:
        if message.get(key) and isinstance(message[key], str):
            changed["reasoning_content"] = message[key]
            break
    calls = changed.pop("tool_calls", None)
    if isinstance(calls, list) and (kept := [_call(call) for call in calls if _is_call(call)]):
        changed["tool_calls"] = kept
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
    if isinstance(part, dict) and part.get("type") in _TEXT_OF:
        text = part.get(_TEXT_OF[part["type"]])
        return text if isinstance(text, str) else None
    return None


def _is_call(call: Any) -> bool:
    return isinstance(call, dict) and isinstance(call.get("function"), dict)


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {
        **{key: value for key, value in call.items() if value is not None},
        "type": "function",
        "function": {**function, "arguments": arguments_of(function.get("arguments"))},
    }


def arguments_of(arguments: Any) -> Any:
    """An object where they are one; what a model once wrote wrongly stays as it was."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
