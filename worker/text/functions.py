"""Tools for templates: as objects for one that knows tools, in plain text for one that does not. Pure.

The text is the one that most open models have seen: functions as JSON lines in `<tools>`, a call as a JSON object in
`<tool_call>`, a result in `<tool_response>`. The templates of LFM2 list the tools and leave the calls to whoever uses
them; its models write calls as Python does (Liquid AI's documentation, "Tool use").
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

from shared.wire import Tool
from worker.text.messages import Message, Messages, has_calls
from worker.text.repairs import joined, prefixed
from worker.text.schemas import typed

Numbered = list[tuple[int, Message]]
"""Messages with the index that each has in the request; -1: it is ours."""

_LFM = ("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: [")
_CALL = (
    '<tool_call>\n{"name": <name of the function>, "arguments": <its arguments, a JSON object>}\n</tool_call>'
)


def as_functions(tools: list[Tool]) -> list[dict[str, Any]]:
    """OpenAI's function objects. The description is always there: templates add strings to it."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": typed(tool.parameters),
            },
        }
        for tool in tools
    ]


def description(functions: list[dict[str, Any]], example: str = "") -> str:
    """The tools, and how to call them. `example`: a call as the template writes it, where it has words for that."""
    lines = "\n".join(_json(function["function"]) for function in functions)
    how = (
        "To call a function, write a JSON object with its name and its arguments between <tool_call> and "
        f"</tool_call>; write one such block for each call:\n{_CALL}"
    )
    if example:
        how = f"A call is written like this one of a function `name` with one argument:\n{example}"
    return (
        "# Tools\n\nYou may call functions to help with what the user asks. Each line between <tools> and </tools> "
        f"is a JSON object that describes one:\n<tools>\n{lines}\n</tools>\n\n{how}"
    )


def described(numbered: Numbered, text: str, *, takes_system: bool) -> Numbered:
    """With a description of tools in the system message, or before the first user's words."""
    index, first = numbered[0] if numbered else (-1, {})
    if not takes_system:
        messages = prefixed([message for _, message in numbered], {"role": "user", "content": text})
        added = len(messages) - len(numbered)
        return list(zip([-1] * added + [index for index, _ in numbered], messages, strict=True))
    if first.get("role") == "system" and isinstance(first["content"], str):
        content = f"{first['content']}\n\n{text}" if first["content"] else text
        return [(index, {**first, "content": content}), *numbered[1:]]
    return [(-1, {"role": "system", "content": text}), *numbered]


def calls_in_text(numbered: Numbered, source: str) -> Numbered:
    """Past calls as part of what the assistant said; `source`: the template's text."""
    write = _as_python if any(mark in source for mark in _LFM) else _as_json
    return [(index, _said(message, write) if has_calls(message) else message) for index, message in numbered]


def _said(message: Message, write: Callable[[list[Message]], str]) -> Message:
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = write([call["function"] for call in message["tool_calls"]])
    content = message["content"]
    if isinstance(content, str):
        return {**rest, "content": f"{content}\n{calls}" if content else calls}
    return {**rest, "content": [*content, {"type": "text", "text": calls}]}


def _as_json(functions: list[Message]) -> str:
    said = [{"name": each.get("name"), "arguments": each.get("arguments", {})} for each in functions]
    return "\n".join(f"<tool_call>\n{_json(each)}\n</tool_call>" for each in said)


def _as_python(functions: list[Message]) -> str:
    calls = ", ".join(f"{each.get('name')}({_python(each.get('arguments', {}))})" for each in functions)
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


def _python(arguments: Any) -> str:
    if not isinstance(arguments, dict):
        return _json(arguments)
    literals = {
        key: _json(value) if isinstance(value, str) else repr(value) for key, value in arguments.items()
    }
    return ", ".join(f"{key}={literal}" for key, literal in literals.items())


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def results_in_text(numbered: Numbered) -> Numbered:
    """Past results as what a user says; those that follow each other are one message."""
    made: Numbered = []
    for is_result, group in itertools.groupby(numbered, lambda pair: pair[1].get("role") == "tool"):
        pairs = list(group)
        if is_result:
            said = "\n".join(_result_text(message["content"]) for _, message in pairs)
            pairs = [(pairs[0][0], {"role": "user", "content": said})]
        made += pairs
    return made


def _result_text(content: Any) -> str:
    return f"<tool_response>\n{content if isinstance(content, str) else _json(content)}\n</tool_response>"


def one_by_one(numbered: Numbered) -> Numbered:
    """Each call in a message of its own with its result right after it, for templates that write one call."""
    made: Numbered = []
    at = 0
    while at < len(numbered):
        index, message = numbered[at]
        at += 1
        if len(message.get("tool_calls", ())) < 2:
            made.append((index, message))
            continue
        results: dict[str, Numbered] = {}
        while at < len(numbered) and numbered[at][1].get("role") == "tool":
            results.setdefault(str(numbered[at][1].get("tool_call_id")), []).append(numbered[at])
            at += 1
        for place, call in enumerate(message["tool_calls"]):
            one = message if not place else {"role": "assistant", "content": ""}
            made.append((index, {**one, "tool_calls": [call]}))
            made += results.pop(str(call.get("id")), [])
        made += [pair for pairs in results.values() for pair in pairs]
    return made


def system_first(numbered: Numbered) -> Numbered:
    """All that systems say in the first message, for templates that leave out what a later one says."""
    said = [pair for pair in numbered if pair[1].get("role") == "system"]
    rest = [pair for pair in numbered if pair[1].get("role") != "system"]
    return [(said[0][0], message) for message in joined([message for _, message in said])] + rest


def num_calls(numbered: Numbered) -> int:
    """How many calls there are in all."""
    return sum(len(message.get("tool_calls", ())) for _, message in numbered)


def speak_of_tools(messages: Messages) -> bool:
    """Whether tools were called in the past."""
    return any(has_calls(message) or message.get("role") == "tool" for message in messages)
