"""OpenAI's SDK over chat completions and text completions."""

import json
from typing import Any

import openai

from tests.conformance.asking import Asked, Dialect, Said, Server, Token

REASONS = {"tool_calls": "calls"}
FORMS = {"regex": "guided_regex", "choice": "guided_choice"}


def _common(server: Server, asked: Asked) -> dict[str, Any]:
    found: dict[str, Any] = {"model": asked.model or server.model, "n": asked.n}
    more: dict[str, Any] = dict(asked.more)
    for name in ("temperature", "seed"):
        if (value := getattr(asked, name)) is not None:
            found[name] = value
    if asked.stop:
        found["stop"] = list(asked.stop)
    if asked.form:
        kind, what = asked.form
        if kind in FORMS:
            more[FORMS[kind]] = what
        elif kind == "object":
            more["response_format"] = {"type": "json_object"}
        else:
            schema = {"name": "it", "schema": what, "strict": True}
            more["response_format"] = {"type": "json_schema", "json_schema": schema}
    return found | {"extra_body": more}


def chat_arguments(server: Server, asked: Asked) -> dict[str, Any]:
    """The arguments of `client.chat.completions.create`."""
    asked = server.settled(asked)
    found = _common(server, asked) | {"messages": asked.messages}
    if asked.max_tokens is not None:
        found["max_completion_tokens"] = asked.max_tokens
    if asked.tools:
        found["tools"] = [
            {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
            for tool in asked.tools
        ]
        found["parallel_tool_calls"] = asked.parallel
    if asked.tool_choice in ("auto", "required", "none"):
        found["tool_choice"] = asked.tool_choice
    elif asked.tool_choice:
        found["tool_choice"] = {"type": "function", "function": {"name": asked.tool_choice}}
    if asked.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": asked.logprobs}
    if asked.thinking is not None:
        found["extra_body"]["chat_template_kwargs"] = {"enable_thinking": asked.thinking is not False}
        if not isinstance(asked.thinking, bool):
            found["extra_body"]["thinking_budget"] = asked.thinking
    return found


def _chat_tokens(logprobs: Any) -> list[Token]:
    entries = (logprobs.content or []) if logprobs else []
    return [Token(each.token, each.logprob, [top.logprob for top in each.top_logprobs]) for each in entries]


def chat_whole(server: Server, asked: Asked) -> Said:
    got = server.openai.chat.completions.create(**chat_arguments(server, asked))
    first = got.choices[0]
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    return Said(
        [choice.message.content or "" for choice in got.choices],
        REASONS.get(first.finish_reason, first.finish_reason),
        [(call.function.name, call.function.arguments) for call in first.message.tool_calls or ()],
        getattr(first.message, "reasoning_content", None) or "",
        got.usage.prompt_tokens,
        got.usage.completion_tokens,
        _chat_tokens(first.logprobs),
        got.model,
    )


def chat_streamed(server: Server, asked: Asked) -> Said:
    """Put together by index and position, as clients do."""
    texts = [""] * asked.n
    reasons = [""] * asked.n
    calls: list[tuple[str, str]] = []
    thought, tokens, usage, model = "", [], None, ""
    arguments = chat_arguments(server, asked) | {"stream_options": {"include_usage": True}}
    for chunk in server.openai.chat.completions.create(**arguments, stream=True):
        assert usage is None, "something comes after the usage"
        usage, model = chunk.usage, chunk.model
        assert not (chunk.usage and chunk.choices)
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += choice.finish_reason or ""
            if choice.index:
                continue
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            tokens += _chat_tokens(choice.logprobs)
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(calls), "calls are not counted up"
                    calls.append((call.function.name, ""))
                name, so_far = calls[call.index]
                calls[call.index] = (name, so_far + (call.function.arguments or ""))
    assert usage is not None, "a stream without usage"
    return Said(
        texts,
        REASONS.get(reasons[0], reasons[0]),
        calls,
        thought,
        usage.prompt_tokens,
        usage.completion_tokens,
        tokens,
        model,
    )


def text_arguments(server: Server, asked: Asked) -> dict[str, Any]:
    """The arguments of `client.completions.create`; the prompt is the last message."""
    found = _common(server, asked) | {"prompt": asked.messages[-1]["content"]}
    if asked.max_tokens is not None:
        found["max_tokens"] = asked.max_tokens
    if asked.logprobs is not None:
        found["logprobs"] = asked.logprobs
    return found


def _text_tokens(logprobs: Any) -> list[Token]:
    if not logprobs:
        return []
    tops = logprobs.top_logprobs or [{}] * len(logprobs.tokens)
    rows = zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=True)
    return [Token(text, value, sorted(top.values(), reverse=True)) for text, value, top in rows]


def text_whole(server: Server, asked: Asked) -> Said:
    got = server.openai.completions.create(**text_arguments(server, asked))
    first = got.choices[0]
    return Said(
        [choice.text for choice in got.choices],
        first.finish_reason,
        [],
        "",
        got.usage.prompt_tokens,
        got.usage.completion_tokens,
        _text_tokens(first.logprobs),
        got.model,
    )


def text_streamed(server: Server, asked: Asked) -> Said:
    arguments = text_arguments(server, asked) | {"stream_options": {"include_usage": True}}
    texts: dict[int, str] = {}
    reason, tokens, usage, model = "", [], None, ""
    for chunk in server.openai.completions.create(**arguments, stream=True):
        usage, model = chunk.usage, chunk.model
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if not choice.index:
                reason += choice.finish_reason or ""
                tokens += _text_tokens(choice.logprobs)
    assert usage is not None, "a stream without usage"
    said = [texts[index] for index in sorted(texts)]
    return Said(said, reason, [], "", usage.prompt_tokens, usage.completion_tokens, tokens, model)


def code_of(error: Exception) -> str:
    """Message and code of an SDK's exception, as text to look into."""
    return f"{error} {json.dumps(getattr(error, 'body', None))}"


CHAT = Dialect(
    "OpenAI chat",
    chat_whole,
    chat_streamed,
    openai.BadRequestError,
    openai.NotFoundError,
    "context_length_exceeded",
)
TEXT = Dialect(
    "OpenAI completions",
    text_whole,
    text_streamed,
    openai.BadRequestError,
    openai.NotFoundError,
    "context_length_exceeded",
)
