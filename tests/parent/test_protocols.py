"""The OpenAI formats: what is accepted, what is refused by which name, and streams that stay whole."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.protocols import PROTOCOLS
from parent.protocols.base import DecodedRequest, Meta, retry_headers
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import completions as openai_completions
from parent.protocols.openai.fields import IGNORED
from shared import wire
from shared.errors import RETRYABLE, ErrorCode, Failure, Refused

ONE = DecodedRequest(prompts=[wire.TextPrompt("hi")])
META = Meta("1" * 32, 1700000000, "model-as-sent", ONE)
USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER]} | fields).encode()


def refused(decode: Any, body: bytes) -> Failure:
    with pytest.raises(Refused) as caught:
        decode(body)
    return caught.value.failure


# ---------------------------------------------------------------- what is wrong

WRONG_CHAT: list[tuple[bytes, str | None, str]] = [
    (b"", None, "not JSON"),
    (b"{", None, "not JSON"),
    (b"\xff", None, "not JSON"),
    (b"[]", None, "Expected `object`"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None, "not JSON"),
    (b"{}", "messages", "missing required field"),
    (b'{"messages": NaN}', None, "not JSON"),
    (chat(messages=[]), "messages", "at least one"),
    (chat(messages="hi"), "messages", "Expected `array`"),
    (chat(messages=["hi"]), "messages[0]", "Expected `object`"),
    (chat(messages=[USER, {"role": "king", "content": "x"}]), "messages[1].role", "'king'"),
    (chat(messages=[{"content": "x"}]), "messages[0].role", "None"),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "null or missing"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "a number"),
    (chat(messages=[{"role": "user", "content": [5]}]), "messages[0].content[0]", "a number"),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text", "null"),
    (chat(messages=[{"role": "assistant", "tool_calls": {}}]), "messages[0].tool_calls", "an object"),
    (
        chat(messages=[{"role": "assistant", "tool_calls": [{}]}]),
        "messages[0].tool_calls[0]",
        "function.name",
    ),
    (chat(temperature=-0.1), "temperature", "from 0 to 5"),
    (chat(temperature=5.1), "temperature", "from 0 to 5"),
    (b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}', None, "not JSON"),
    (b'{"messages":[{"role":"user","content":"x"}],"temperature":Infinity}', None, "not JSON"),
    (b'{"messages":[{"role":"user","content":"x"}],"temperature":1e999}', "temperature", "range"),
    (chat(temperature="1"), "temperature", "Expected `float | null`"),
    (chat(top_p=0), "top_p", "above 0"),
    (chat(top_p=1.01), "top_p", "at most 1"),
    (chat(top_k=-1), "top_k", "0 (off) or more"),
    (chat(top_k=1.5), "top_k", "Expected `int | null`"),
    (chat(min_p=1.5), "min_p", "from 0 to 1"),
    (chat(max_tokens=0), "max_tokens", "1 or more"),
    (chat(max_completion_tokens=-5), "max_completion_tokens", "1 or more"),
    (chat(seed=1.5), "seed", "Expected `int | null`"),
    (chat(seed=2**70), "seed", "64 bits"),
    (chat(stop=["a"] * 5), "stop", "at most 4"),
    (chat(stop=""), "stop", "empty"),
    (chat(stop=[1]), "stop[0]", "Expected `str`"),
    (chat(n=0), "n", "must be 1"),
    (chat(model=5), "model", "Expected `str | null`"),
    (chat(stream="yes"), "stream", "Expected `bool | null`"),
    (chat(reasoning_effort="heroic"), "reasoning_effort", "'heroic'"),
    (chat(chat_template_kwargs=[]), "chat_template_kwargs", "Expected `object | null`"),
]


@pytest.mark.parametrize(("body", "param", "says"), WRONG_CHAT)
def test_a_wrong_chat_request_names_the_field_and_the_fault(
    body: bytes, param: str | None, says: str
) -> None:
    failure = refused(openai_chat.decode, body)
    assert failure.code is ErrorCode.INVALID_REQUEST
    assert failure.param == param
    assert says in failure.message
    assert "\n" not in failure.message
    assert len(failure.message) < 300


UNSUPPORTED: list[tuple[str, Any]] = [
    ("modalities", ["text", "audio"]),
    ("web_search_options", {}),
    ("moderation", {"model": "x"}),
    ("suffix", "x"),
    ("response_format", {"type": "structural_tag"}),
    ("tool_choice", {"type": "custom", "custom": {"name": "f"}}),
]


@pytest.mark.parametrize(("field", "value"), UNSUPPORTED)
def test_a_field_that_would_change_the_answer_and_is_not_here_is_refused_by_name(
    field: str, value: Any
) -> None:
    failure = refused(openai_chat.decode, chat(**{field: value}))
    assert (failure.code, failure.param) == (ErrorCode.UNSUPPORTED, field)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", None])
def test_parts_that_are_not_text_are_refused_by_place(kind: str | None) -> None:
    body = chat(messages=[USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}])
    failure = refused(openai_chat.decode, body)
    assert (failure.code, failure.param) == (ErrorCode.UNSUPPORTED, "messages[1].content[1].type")


NEUTRAL = {
    "tools": [],
    "functions": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "logprobs": False,
    "top_logprobs": 0,
    "n": 1,
    "logit_bias": {},
    "hlg": {"enabled": False, "width": 1},
    "modalities": ["text"],
    "stop": None,
    "seed": None,
    "reasoning": {},
    "stream_options": {"include_obfuscation": False},
    "an_unknown_field": {"deep": [1, None]},
} | {name: {"a": [1]} for name in sorted(IGNORED)}


@pytest.mark.parametrize("field", NEUTRAL)
def test_neutral_values_and_unknown_fields_are_accepted(field: str) -> None:
    assert openai_chat.decode(chat(**{field: NEUTRAL[field]})) == openai_chat.decode(chat())


def test_tools_that_must_not_be_called_are_accepted() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert openai_chat.decode(chat(tools=tools, tool_choice="none")) == openai_chat.decode(chat())


# ---------------------------------------------------------------- what is right


def test_all_fields_arrive() -> None:
    body = chat(
        model="m", stream=True, stream_options={"include_usage": True}, temperature=0, top_p=0.5, top_k=4,
        min_p=0.1, max_tokens=9, max_completion_tokens=8, seed=5, stop=["a", "b"],
    )  # fmt: skip
    asked = openai_chat.decode(body)
    assert (asked.model, asked.stream, asked.include_usage) == ("m", True, True)
    assert asked.sampling == wire.Sampling(0, 0.5, 4, 0.1)
    [request] = asked.to_generate("id", 99)
    assert (request.max_tokens, request.seed, request.stop) == (8, 5, ["a", "b"])
    assert openai_chat.decode(chat()).to_generate("id", 99)[0].seed == 99


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
        ({"chat_template_kwargs": {"x": [1]}}, {"x": [1]}),
    ],
)
def test_reasoning_effort_becomes_template_arguments(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    prompt = openai_chat.decode(chat(**fields)).prompts[0]
    assert isinstance(prompt, wire.ChatPrompt)
    assert prompt.template_kwargs == kwargs


@pytest.mark.parametrize(
    ("prompt", "decoded"),
    [
        ("x", wire.TextPrompt("x")),
        (["x"], wire.TextPrompt("x")),
        ([1, 2], wire.TokenPrompt([1, 2])),
        ([[1, 2]], wire.TokenPrompt([1, 2])),
    ],
)
def test_a_completion_prompt_has_four_forms(prompt: Any, decoded: wire.Prompt) -> None:
    asked = openai_completions.decode(json.dumps({"prompt": prompt}).encode())
    assert asked.prompts[0] == decoded
    assert not asked.split_reasoning


@pytest.mark.parametrize(
    "prompt", ["", [], None, 5, [None], [True], [1, "x"], [-1], [[]], {}, [1.5], [2**70]]
)
def test_other_completion_prompts_are_refused(prompt: Any) -> None:
    failure = refused(openai_completions.decode, json.dumps({"prompt": prompt}).encode())
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, "prompt")


@given(st.binary(max_size=200) | st.recursive(st.none() | st.booleans() | st.text() | st.floats() | st.integers(),
       lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["messages", "role", "content", "prompt",
       "stop", "seed", "tools", "type", "text", "tool_calls", "function", "temperature"]), inner)).map(
       lambda value: json.dumps(value).encode()))  # fmt: skip
def test_no_body_whatever_raises_anything_but_refused(body: bytes) -> None:
    for protocol in PROTOCOLS:
        with contextlib.suppress(Refused):
            assert protocol.decode(body).prompts[0]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("code", ErrorCode)
@pytest.mark.parametrize(
    "protocol", [openai_chat.PROTOCOL, openai_completions.PROTOCOL], ids=lambda protocol: protocol.name
)
def test_every_error_code_has_a_status_a_shape_and_a_word_on_retrying(code: ErrorCode, protocol: Any) -> None:
    failure = Failure(code, "what is wrong", "field")
    status, body = protocol.error(failure)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["message"], error["param"]) == ("what is wrong", "field")
    headers = dict(retry_headers(failure))
    assert (b"retry-after" in headers) is (code in RETRYABLE)
    assert (headers.get(b"x-should-retry") == b"false") is (status >= 500 and code not in RETRYABLE)
    frame = protocol.stream(META).fail(failure)
    assert json.loads(frame.removeprefix(b"data: ")) == {"error": error}
    assert frame.endswith(b"\n\n")
