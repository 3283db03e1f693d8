"""Ollama's Python client over its chat."""

import json
from typing import Any

import ollama

from tests.conformance.asking import Asked, Dialect, Messages, Said, Server, Token


def turns(messages: Messages) -> Messages:
    """A conversation with arguments as objects and results by their tool's name."""
    found: Messages = []
    names = {}
    for message in messages:
        if message["role"] == "tool":
            name = names[message["tool_call_id"]]
            found.append({"role": "tool", "tool_name": name, "content": message["content"]})
            continue
        calls = []
        for call in message.get("tool_calls", ()):
            function = call["function"]
            names[call["id"]] = function["name"]
            calls.append(
                {"function": {"name": function["name"], "arguments": json.loads(function["arguments"])}}
            )
        turn = {"role": message["role"], "content": message.get("content") or ""}
        found.append(turn | ({"tool_calls": calls} if calls else {}))
    return found


def arguments(server: Server, asked: Asked) -> dict[str, Any]:
    """The arguments of `client.chat`."""
    asked = server.settled(asked)
    options: dict[str, Any] = dict(asked.more)
    for name, value in (
        ("num_predict", asked.max_tokens),
        ("temperature", asked.temperature),
        ("seed", asked.seed),
        ("stop", list(asked.stop) or None),
    ):
        if value is not None:
            options[name] = value
    found: dict[str, Any] = {"model": asked.model or server.model, "messages": turns(asked.messages)}
    if asked.tools:
        found["tools"] = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
            for tool in asked.tools
        ]
    if asked.form:
        found["format"] = "json" if asked.form[0] == "object" else asked.form[1]
    if asked.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": asked.logprobs}
    if asked.thinking is not None:
        found["think"] = asked.thinking
    return found | {"options": options}


def _said(parts: list[ollama.ChatResponse]) -> Said:
    last = parts[-1]
    assert last.done
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    tokens = [
        Token(each.token, each.logprob, [top.logprob for top in each.top_logprobs or ()])
        for part in parts
        for each in part.logprobs or ()
    ]
    assert last.done_reason
    return Said(
        ["".join(part.message.content or "" for part in parts)],
        "calls" if calls and last.done_reason == "stop" else last.done_reason,
        [(call.name, json.dumps(dict(call.arguments))) for call in calls],
        "".join(part.message.thinking or "" for part in parts),
        last.prompt_eval_count or 0,
        last.eval_count or 0,
        tokens,
        last.model or "",
    )


def whole(server: Server, asked: Asked) -> Said:
    return _said([server.ollama.chat(**arguments(server, asked))])


def streamed(server: Server, asked: Asked) -> Said:
    return _said(list(server.ollama.chat(**arguments(server, asked), stream=True)))


OLLAMA = Dialect("Ollama", whole, streamed, ollama.ResponseError, ollama.ResponseError, "context")
