"""Bodies of Ollama's routes: what each field becomes, what is refused by which name; streams cut anywhere."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.protocols.base import Answer, DecodedRequest, Manners, Meta
from parent.protocols.ollama import formats as ollama
from parent.protocols.ollama import models as ollama_models
from parent.protocols.ollama.answer import Moment
from parent.protocols.ollama.fields import Options
from parent.protocols.ollama.request import ChatBody, GenerateBody, decode_chat, decode_generate
from shared import wire
from shared.errors import ErrorCode, Failure, Refused
from tests.parent.test_anthropic_streams import answers

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NOW = Moment("2026-01-02T03:04:05Z", 5)


def chat(**fields: Any) -> DecodedRequest:
    return decode_chat(json.dumps({"model": "m", "messages": [USER]} | fields).encode())


def generate(**fields: Any) -> DecodedRequest:
    return decode_generate(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def options(**fields: Any) -> DecodedRequest:
    return chat(options=fields)


def prompt_of(asked: DecodedRequest) -> wire.ChatPrompt:
    [prompt] = asked.prompts
    assert isinstance(prompt, wire.ChatPrompt)
    return prompt


FIELDS: list[tuple[DecodedRequest, str, Any]] = [
    (chat(), "stream", True),
    (chat(stream=False), "stream", False),
    (chat(keep_alive="5m"), "keep_alive_s", 300.0),
    (chat(keep_alive=-1), "keep_alive_s", float("inf")),
    (chat(format="json"), "grammar", wire.JsonObject()),
    (chat(format=""), "grammar", None),
    (chat(format=SCHEMA), "grammar", wire.JsonSchema(SCHEMA)),
    (generate(format=SCHEMA), "grammar", wire.JsonSchema(SCHEMA)),
    (chat(logprobs=True), "logprobs", 0),
    (chat(logprobs=True, top_logprobs=3), "logprobs", 3),
    (chat(top_logprobs=3), "logprobs", None),
    (options(num_predict=9), "max_tokens", 9),
    (options(num_predict=-1), "max_tokens", None),
    (options(num_predict=-2), "max_tokens", None),
    (options(num_predict=0), "max_tokens", None),
    (options(num_ctx=64), "max_context", 64),
    (options(seed=3), "seed", 3),
    (options(seed=-1), "seed", None),
    (options(stop=["a", "b"]), "stop", ["a", "b"]),
    (options(stop="a"), "stop", ["a"]),
    (options(temperature=0), "sampling", wire.Sampling(temperature=0)),
    (options(top_p=0.5, top_k=3, min_p=0.1), "sampling", wire.Sampling(top_p=0.5, top_k=3, min_p=0.1)),
    (options(top_k=-1), "sampling", wire.Sampling(top_k=0)),
    (options(repeat_penalty=1.5), "sampling", wire.Sampling(repetition_penalty=1.5)),
    (
        options(repeat_penalty=1.5, repeat_last_n=-1),
        "sampling",
        wire.Sampling(repetition_penalty=1.5, repetition_window=0),
    ),
    (
        options(repeat_penalty=1.5, repeat_last_n=0),
        "sampling",
        wire.Sampling(repetition_penalty=1.0, repetition_window=0),
    ),
    (
        options(presence_penalty=1, frequency_penalty=-1),
        "sampling",
        wire.Sampling(presence_penalty=1, frequency_penalty=-1),
    ),
    (options(num_gpu=99, num_thread=8, mirostat=0, typical_p=1.0, nobody_knows=1), "sampling", wire.Sampling()),
    (chat(messages=[]), "prompts", []),
    (chat(messages=None), "prompts", []),
    (generate(prompt=""), "prompts", []),
    (generate(prompt="x", raw=True), "prompts", [wire.TextPrompt("x")]),
    (generate(context=[1, 2]), "prompts", [wire.ChatPrompt([USER])]),
    (
        generate(system="be brief"),
        "prompts",
        [wire.ChatPrompt([{"role": "system", "content": "be brief"}, USER])],
    ),
    (generate(think=False), "prompts", [wire.ChatPrompt([USER], {"enable_thinking": False})]),
    (chat(think=True), "prompts", [wire.ChatPrompt([USER], {"enable_thinking": True})]),
    (
        chat(think="high"),
        "prompts",
        [wire.ChatPrompt([USER], {"enable_thinking": True, "reasoning_effort": "high"})],
    ),
    (chat(tools=[TOOL]), "prompts", [wire.ChatPrompt([USER], {}, [wire.Tool("f", "", {"type": "object"})])]),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "field", "value"), FIELDS)
def test_ollama_fields_become_ours(asked: DecodedRequest, field: str, value: Any) -> None:
    assert getattr(asked, field) == value


REFUSED: list[tuple[Any, dict[str, Any], str, ErrorCode]] = [
    (chat, {"format": "xml"}, "format", ErrorCode.INVALID_REQUEST),
    (chat, {"think": "hardly"}, "think", ErrorCode.INVALID_REQUEST),
    (chat, {"keep_alive": "soon"}, "keep_alive", ErrorCode.INVALID_REQUEST),
    (chat, {"options": {"temperature": 9}}, "temperature", ErrorCode.INVALID_REQUEST),
    (chat, {"options": {"mirostat": 2}}, "options.mirostat", ErrorCode.UNSUPPORTED),
    (chat, {"options": {"typical_p": 0.7}}, "options.typical_p", ErrorCode.UNSUPPORTED),
    (chat, {"options": {"stop": ["x"] * 65}}, "options.stop", ErrorCode.INVALID_REQUEST),
    (chat, {"options": {"num_ctx": "much"}}, "options.num_ctx", ErrorCode.INVALID_REQUEST),
    (chat, {"messages": [USER | {"images": ["AA=="]}]}, "messages[0].images", ErrorCode.UNSUPPORTED),
    (chat, {"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role", ErrorCode.INVALID_REQUEST),
    (chat, {"messages": "hi"}, "messages", ErrorCode.INVALID_REQUEST),
    (
        chat,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        ErrorCode.INVALID_REQUEST,
    ),
    (generate, {"images": ["AA=="]}, "images", ErrorCode.UNSUPPORTED),
    (generate, {"suffix": "x"}, "suffix", ErrorCode.UNSUPPORTED),
    (generate, {"template": "{{ .Prompt }}"}, "template", ErrorCode.UNSUPPORTED),
    (generate, {"raw": True, "system": "x"}, "system", ErrorCode.INVALID_REQUEST),
]


@pytest.mark.parametrize(("ask", "fields", "param", "code"), REFUSED)
def test_ollama_fields_that_cannot_be_are_refused_by_name(
    ask: Any, fields: dict[str, Any], param: str, code: ErrorCode
) -> None:
    with pytest.raises(Refused) as caught:
        ask(**fields)
    assert (caught.value.failure.param, caught.value.failure.code) == (param, code)


def test_ollama_history_has_ids_and_arguments_as_text() -> None:
    arguments = '{"b": 1, "a": [ "x" ]}'
    turns = [
        {"role": "User", "content": "hi"},
        {
            "role": "assistant",
            "thinking": "hm",
            "tool_calls": [
                {"function": {"name": "f", "arguments": msgspec.Raw(arguments.encode())}},
                {"function": {"name": "g"}},
            ],
        },
        {"role": "tool", "tool_name": "g", "content": "2"},
        {"role": "tool", "content": "1"},
    ]
    body = msgspec.json.encode({"messages": turns})
    messages = prompt_of(decode_chat(body)).messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in messages[1]["tool_calls"]] == [arguments, "{}"]
    first, second = (call["id"] for call in messages[1]["tool_calls"])
    assert [message["tool_call_id"] for message in messages[2:]] == [second, first]


def test_ollama_goes_on_with_a_last_message_of_the_assistant() -> None:
    begun = {"role": "assistant", "content": "Once"}
    assert prompt_of(chat(messages=[USER, begun])).continue_final
    assert prompt_of(chat(messages=[USER, begun | {"content": ""}])).messages == [USER]


@given(st.sampled_from([decode_chat, decode_generate]), st.data())
def test_any_ollama_body_is_read_or_refused(decode: Any, data: st.DataObject) -> None:
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    )
    kind = ChatBody if decode is decode_chat else GenerateBody
    names = [field.name for field in msgspec.structs.fields(kind)]
    body = data.draw(st.dictionaries(st.sampled_from(names), values, max_size=6))
    known = [field.name for field in msgspec.structs.fields(Options)]
    if data.draw(st.booleans()):
        body["options"] = data.draw(st.dictionaries(st.sampled_from(known), values, max_size=6))
    with contextlib.suppress(Refused):
        decode(json.dumps(body).encode(), Manners())


# ---------------------------------------------------------------- answers

FINISH = wire.Finish("stop", wire.Usage(7, 5), wire.Timings(0.0, 1e-9, 2e-9))


def meta(asked: DecodedRequest) -> Meta:
    return Meta("id", 0, "m", asked)


@given(answers(), st.data())
def test_an_ollama_stream_cut_anywhere_is_the_whole_answer(
    events: list[wire.Event], data: st.DataObject
) -> None:
    protocol = ollama.chat(lambda: NOW)
    asked = chat()
    encoder = protocol.stream(meta(asked))
    whole = Answer()
    whole.add([*events, FINISH])
    stream, rest = b"", list(events)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        stream += encoder.feed(rest[:size])
        rest = rest[size:]
    stream += encoder.finish(FINISH)
    lines = [json.loads(line) for line in stream.splitlines()]
    told = json.loads(protocol.answer(meta(asked), [whole]))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    for name in ("content", "thinking"):
        joined = "".join(line["message"].get(name, "") for line in lines)
        assert joined == told["message"].get(name, "")
    calls = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert calls == told["message"].get("tool_calls", [])
    assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    for name in ("done_reason", "eval_count", "prompt_eval_count", "total_duration", "eval_duration"):
        assert lines[-1][name] == told[name]


def test_ollama_times_are_never_nothing() -> None:
    protocol = ollama.generate(lambda: NOW)
    last = json.loads(protocol.stream(meta(generate())).finish(FINISH))
    assert (last["prompt_eval_duration"], last["eval_duration"], last["load_duration"]) == (1, 2, 2)
    assert last["total_duration"] == NOW.elapsed_ns


def test_an_ollama_failure_in_a_stream_is_one_line() -> None:
    encoder = ollama.chat(lambda: NOW).stream(meta(chat()))
    assert encoder.fail(Failure(ErrorCode.ENGINE_FAULT, "broken\nhere")) == b'{"error":"broken\\nhere"}\n'


@pytest.mark.parametrize(
    ("name", "hub"),
    [("hf.co/a/b", "a/b"), ("huggingface.co/a/b:latest", "a/b"), ("a/b", "a/b"), ("llama3.2", "llama3.2")],
)
def test_ollama_names_of_the_hub(name: str, hub: str) -> None:
    assert ollama_models.hub_name(name) == hub
