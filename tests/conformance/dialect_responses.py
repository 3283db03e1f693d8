"""OpenAI's SDK over the Responses API."""

from collections.abc import Iterator
from typing import Any

import openai
from openai.types.responses import Response

from tests.conformance.asking import Asked, Dialect, Messages, Said, Server, Token


def items(messages: Messages) -> Iterator[dict[str, Any]]:
    """A conversation as input items."""
    for message in messages:
        if message["role"] == "tool":
            result = {"call_id": message["tool_call_id"], "output": message["content"]}
            yield {"type": "function_call_output", **result}
            continue
        content = message.get("content")
        if isinstance(content, list):
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            content = [{"type": kind, "text": part["text"]} for part in content]
        if content:
            yield {"role": message["role"], "content": content}
        for call in message.get("tool_calls", ()):
            function = call["function"]
            yield {"type": "function_call", "call_id": call["id"], **function}


def arguments(server: Server, asked: Asked) -> dict[str, Any]:
    """The arguments of `client.responses.create`."""
    asked = server.settled(asked)
    found: dict[str, Any] = {"model": asked.model or server.model, "input": list(items(asked.messages))}
    more: dict[str, Any] = {"seed": asked.seed} | asked.more
    if asked.temperature is not None:
        found["temperature"] = asked.temperature
    if asked.max_tokens is not None:
        found["max_output_tokens"] = asked.max_tokens
    if asked.stop:
        more["stop"] = list(asked.stop)
    if asked.tools:
        found["tools"] = [
            {"type": "function", "name": tool.name, "parameters": tool.parameters, "strict": True}
            for tool in asked.tools
        ]
        found["parallel_tool_calls"] = asked.parallel
    if asked.tool_choice in ("auto", "required", "none"):
        found["tool_choice"] = asked.tool_choice
    elif asked.tool_choice:
        found["tool_choice"] = {"type": "function", "name": asked.tool_choice}
    if asked.form:
        kind, what = asked.form
        schema = {"type": "json_schema", "name": "it", "schema": what, "strict": True}
        found["text"] = {"format": {"type": "json_object"} if kind == "object" else schema}
    if asked.logprobs is not None:
        found |= {"include": ["message.output_text.logprobs"], "top_logprobs": asked.logprobs}
    if asked.thinking is not None:
        more["chat_template_kwargs"] = {"enable_thinking": asked.thinking is not False}
        if not isinstance(asked.thinking, bool):
            more["thinking_budget"] = asked.thinking
    return found | {"extra_body": more}


def _said(got: Response) -> Said:
    calls = [(item.name, item.arguments) for item in got.output if item.type == "function_call"]
    parts = [part for item in got.output if item.type == "message" for part in item.content]
    thoughts = [part for item in got.output if item.type == "reasoning" for part in item.content or ()]
    tokens = [
        Token(each.token, each.logprob, [top.logprob for top in each.top_logprobs])
        for part in parts
        if part.type == "output_text"
        for each in part.logprobs or ()
    ]
    assert got.status in ("completed", "incomplete"), got.status
    reason = "calls" if calls else "stop"
    if got.incomplete_details:
        assert got.incomplete_details.reason == "max_output_tokens"
        reason = "length"
    assert got.usage is not None
    return Said(
        [got.output_text],
        reason,
        calls,
        "".join(part.text for part in thoughts),
        got.usage.input_tokens,
        got.usage.output_tokens,
        tokens,
        got.model,
    )


def whole(server: Server, asked: Asked) -> Said:
    return _said(server.openai.responses.create(**arguments(server, asked)))


def streamed(server: Server, asked: Asked) -> Said:
    """From the last event, once deltas, numbers and items agree with it."""
    seen, text, called, thought = [], "", "", ""
    for event in server.openai.responses.create(**arguments(server, asked), stream=True):
        seen.append(event)
        text += event.delta if event.type == "response.output_text.delta" else ""
        called += event.delta if event.type == "response.function_call_arguments.delta" else ""
        thought += event.delta if event.type == "response.reasoning_text.delta" else ""
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert [event.type for event in seen[:2]] == ["response.created", "response.in_progress"]
    last = seen[-1]
    assert last.type in ("response.completed", "response.incomplete"), last.type
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    assert done == last.response.output
    said = _said(last.response)
    assert (text, thought) == (said.text, said.thought)
    assert called == "".join(arguments for _, arguments in said.calls)
    return said


RESPONSES = Dialect(
    "OpenAI Responses",
    whole,
    streamed,
    openai.BadRequestError,
    openai.NotFoundError,
    "context_length_exceeded",
)
