"""Anthropic's SDK over Messages."""

import json
from typing import Any

import anthropic

from tests.conformance.asking import Asked, Dialect, Messages, Said, Server

REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "calls",
}
CHOICES = {"required": "any", "auto": "auto", "none": "none"}


def turns(messages: Messages) -> Messages:
    """A conversation as turns of blocks, without its system messages."""
    found: Messages = []
    for message in messages:
        if message["role"] == "system":
            continue
        if message["role"] == "tool":
            result = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            found.append({"role": "user", "content": [{"type": "tool_result", **result}]})
        elif calls := message.get("tool_calls"):
            blocks = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": json.loads(call["function"]["arguments"]),
                }
                for call in calls
            ]
            found.append({"role": "assistant", "content": blocks})
        else:
            found.append({"role": message["role"], "content": message["content"]})
    return found


def arguments(server: Server, asked: Asked) -> dict[str, Any]:
    """The arguments of `client.messages.create`."""
    asked = server.settled(asked)
    found: dict[str, Any] = {"model": asked.model or server.model, "messages": turns(asked.messages)}
    found["max_tokens"] = asked.max_tokens or server.context
    more: dict[str, Any] = dict(asked.more)
    for name in ("temperature", "seed"):
        if (value := getattr(asked, name)) is not None:
            more[name] = value
    system = [message["content"] for message in asked.messages if message["role"] == "system"]
    if system:
        found["system"] = "\n".join(system)
    if asked.stop:
        found["stop_sequences"] = list(asked.stop)
    if asked.tools:
        found["tools"] = [{"name": tool.name, "input_schema": tool.parameters} for tool in asked.tools]
    if asked.tool_choice:
        kind = CHOICES.get(asked.tool_choice, "tool")
        choice: dict[str, Any] = {"type": kind}
        if kind == "tool":
            choice["name"] = asked.tool_choice
        if not asked.parallel:
            choice["disable_parallel_tool_use"] = True
        found["tool_choice"] = choice
    if asked.form:
        found["output_config"] = {"format": {"type": "json_schema", "schema": asked.form[1]}}
    if asked.thinking is False:
        found["thinking"] = {"type": "disabled"}
    elif asked.thinking is not None:
        budget = 1024 if asked.thinking is True else asked.thinking
        found["thinking"] = {"type": "enabled", "budget_tokens": budget}
    return found | {"extra_body": more}


def _said(got: Any) -> Said:
    blocks = got.content
    usage = got.usage
    kept = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return Said(
        ["".join(block.text for block in blocks if block.type == "text")],
        REASONS[got.stop_reason],
        [(block.name, json.dumps(block.input)) for block in blocks if block.type == "tool_use"],
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        usage.input_tokens + kept,
        usage.output_tokens,
        [],
        got.model,
        got.stop_sequence or "",
    )


def whole(server: Server, asked: Asked) -> Said:
    return _said(server.anthropic.messages.create(**arguments(server, asked)))


def streamed(server: Server, asked: Asked) -> Said:
    """Put together by the SDK; its text stream says the same."""
    with server.anthropic.messages.stream(**arguments(server, asked)) as stream:
        text = "".join(stream.text_stream)
        said = _said(stream.get_final_message())
    assert text == said.text
    return said


ANTHROPIC = Dialect(
    "Anthropic Messages",
    whole,
    streamed,
    anthropic.BadRequestError,
    anthropic.NotFoundError,
    "prompt is too long",
)
