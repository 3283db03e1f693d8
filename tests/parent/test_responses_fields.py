"""Bodies of the Responses API: each field does what it says, or is refused by name."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parent.protocols.base import PLAIN, Manners, Meta
from parent.protocols.responses import decode as responses
from parent.protocols.responses.object import begun
from parent.protocols.responses.request import ResponsesRequest
from shared import wire
from shared.errors import ErrorCode, Failure, Refused

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
NOW = {"type": "function", "name": "now"}
PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}  # fmt: skip
SERVER = {"type": "namespace", "name": "mcp__time__", "description": "Clocks.", "tools": [NOW, PATCH]}
CRM = {"type": "namespace", "name": "crm", "description": "", "tools": [NOW]}


def ask(manners: Manners = PLAIN, **fields: Any) -> ResponsesRequest:
    return responses.decode(json.dumps({"input": "hi"} | fields).encode(), manners)


def chat(asked: ResponsesRequest) -> wire.ChatPrompt:
    [prompt] = asked.prompts
    assert isinstance(prompt, wire.ChatPrompt)
    return prompt


def names(asked: ResponsesRequest) -> list[str]:
    return [tool.name for tool in chat(asked).tools]


@pytest.mark.parametrize(
    ("fields", "attribute", "expected"),
    [
        ({"model": "m"}, "model", "m"),
        ({"stream": True}, "stream", True),
        ({"max_output_tokens": 5}, "max_tokens", 5),
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"max_output_tokens": 10**30}, "max_tokens", (1 << 63) - 1),
        ({"stop": ["a", "b"]}, "stop", ["a", "b"]),
        ({"seed": -1}, "seed", (1 << 63) - 1),
        ({"thinking_budget": 0}, "thinking_budget", 0),
        ({"keep_alive": "5m"}, "keep_alive_s", 300.0),
        ({}, "logprobs", None),
        ({"top_logprobs": 3}, "logprobs", None),
        ({"include": ["message.output_text.logprobs"]}, "logprobs", 0),
        ({"include": ["message.output_text.logprobs", "x"], "top_logprobs": 20}, "logprobs", 20),
        ({"include": ["reasoning.encrypted_content"]}, "logprobs", None),
        ({"text": {"format": {"type": "text"}}}, "grammar", None),
        ({"text": {"format": {"type": "json_object"}}}, "grammar", wire.JsonObject()),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
            "grammar",
            wire.JsonSchema(SCHEMA),
        ),
        ({"guided_regex": "a+"}, "grammar", wire.Regex("a+")),
        (
            {"text": {"format": {"type": "json_object"}}, "tools": [NOW], "tool_choice": "required"},
            "grammar",
            None,
        ),
        ({"tools": [NOW]}, "tool_choice", wire.ToolChoice()),
        ({"tools": [NOW], "parallel_tool_calls": False}, "tool_choice", wire.ToolChoice(parallel=False)),
        ({"tools": [NOW], "tool_choice": "required"}, "tool_choice", wire.ToolChoice("required")),
        (
            {"tools": [NOW, WEATHER], "tool_choice": {"type": "function", "name": "now"}},
            "tool_choice",
            wire.ToolChoice("required", "now"),
        ),
        (
            {"tools": [NOW, PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}},
            "tool_choice",
            wire.ToolChoice("required", "apply_patch"),
        ),
        (
            {"tools": [SERVER], "tool_choice": {"type": "function", "namespace": "mcp__time__", "name": "now"}},
            "tool_choice",
            wire.ToolChoice("required", "mcp__time__now"),
        ),
        ({"tools": [{**SERVER, "tools": [{"type": "mcp"}]}]}, "ignored", ["mcp"]),
        ({"tools": [NOW, {"type": "mcp"}, {"type": "web_search"}, {"type": "mcp"}]}, "ignored", ["mcp", "web_search"]),
    ],
)  # fmt: skip
def test_responses_field_is_put_into_our_words(fields: dict[str, Any], attribute: str, expected: Any) -> None:
    assert getattr(ask(**fields), attribute) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"reasoning": {"effort": "high"}}, {"enable_thinking": True, "reasoning_effort": "high"}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"reasoning": {"summary": "auto"}}, {}),
        (
            {"reasoning": {"effort": "low"}, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
    ],
)
def test_responses_reasoning_reaches_the_template(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert chat(ask(**fields)).template_kwargs == expected


def test_responses_tools_are_functions_and_custom_ones_take_one_text() -> None:
    asked = ask(tools=[WEATHER, PATCH, {"type": "local_shell"}])
    weather, patch = chat(asked).tools
    assert weather == wire.Tool("get_weather", "", SCHEMA, True)
    assert patch.parameters["required"] == ["input"]
    assert patch.description.startswith("Edits files.")
    assert "start: /.+/" in patch.description
    assert asked.shown.custom == {"apply_patch"}
    assert [tool["type"] for tool in asked.shown.tools] == ["function", "custom"]


def test_responses_tools_of_a_namespace_have_both_names_in_one() -> None:
    asked = ask(tools=[NOW, SERVER, CRM])
    assert names(asked) == ["now", "mcp__time__now", "mcp__time__apply_patch", "crm__now"]
    assert asked.shown.namespaced == {
        "mcp__time__now": ("mcp__time__", "now"),
        "mcp__time__apply_patch": ("mcp__time__", "apply_patch"),
        "crm__now": ("crm", "now"),
    }
    assert asked.shown.custom == {"mcp__time__apply_patch"}
    told = asked.shown.tools[1]
    assert (told["type"], told["name"], told["description"]) == ("namespace", "mcp__time__", "Clocks.")
    assert [each["name"] for each in told["tools"]] == ["now", "apply_patch"]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([CRM, CRM], "tools[1].tools[0]"),
        ([{**CRM, "name": "c" * 130}], "tools[0].tools[0].name"),
        ([{**CRM, "name": "a b"}], "tools[0].tools[0].name"),
        ([{**CRM, "tools": [{**NOW, "name": ""}]}], "tools[0].tools[0].name"),
        ([{**CRM, "tools": [5]}], "tools[0].tools[0]"),
        ([{**CRM, "tools": [{"type": 5}]}], "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "crm"}], "tools[0]"),
        ([{"type": "web_search"}, NOW, NOW], "tools[2]"),
    ],
)
def test_responses_namespaces_are_refused_by_place(tools: list[Any], param: str) -> None:
    with pytest.raises(Refused) as refused:
        ask(tools=tools)
    assert refused.value.failure.param == param


@pytest.mark.parametrize(
    ("choice", "kept"),
    [
        ("auto", ["now", "get_weather"]),
        ("none", []),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, ["now"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "now"}, {"type": "mcp"}]}, ["now"]),
    ],
)
def test_responses_tool_choice_leaves_out_what_may_not_be_called(choice: Any, kept: list[str]) -> None:
    assert names(ask(tools=[NOW, WEATHER], tool_choice=choice)) == kept


REFUSED: dict[str, tuple[dict[str, Any], str, ErrorCode]] = {
    "no input": ({"input": None}, "input", ErrorCode.INVALID_REQUEST),
    "empty input": ({"input": []}, "input", ErrorCode.INVALID_REQUEST),
    "nothing known in it": ({"input": [{"type": "web_search_call"}]}, "input", ErrorCode.INVALID_REQUEST),
    "messages": ({"messages": []}, "messages", ErrorCode.INVALID_REQUEST),
    "a role": ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", ErrorCode.INVALID_REQUEST),
    "content": ({"input": [{"role": "user", "content": 5}]}, "input[0].content", ErrorCode.INVALID_REQUEST),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
        "input[0].content[0].type",
        ErrorCode.UNSUPPORTED,
    ),
    "a file": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]}]},
        "input[0].output[0].type",
        ErrorCode.UNSUPPORTED,
    ),
    "a part": ({"input": [{"role": "user", "content": ["x"]}]}, "input[0].content[0]", ErrorCode.INVALID_REQUEST),
    "a call without a name": (
        {"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]},
        "input[0].name",
        ErrorCode.INVALID_REQUEST,
    ),
    "no arguments": (
        {"input": [{"type": "function_call", "call_id": "c", "name": "n", "arguments": {}}]},
        "input[0].arguments",
        ErrorCode.INVALID_REQUEST,
    ),
    "thoughts": ({"input": [{"type": "reasoning", "summary": "x"}]}, "input[0].summary", ErrorCode.INVALID_REQUEST),
    "a type": ({"input": [{"type": 5}]}, "input[0].type", ErrorCode.INVALID_REQUEST),
    "an item of elsewhere": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", ErrorCode.NOT_FOUND),
    "conversation": ({"conversation": "conv_1"}, "conversation", ErrorCode.UNSUPPORTED),
    "prompt": ({"prompt": {"id": "p"}}, "prompt", ErrorCode.UNSUPPORTED),
    "background unstored": ({"background": True, "store": False}, "background", ErrorCode.INVALID_REQUEST),
    "several": ({"n": 2}, "n", ErrorCode.UNSUPPORTED),
    "truncation": ({"truncation": "some"}, "truncation", ErrorCode.INVALID_REQUEST),
    "max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens", ErrorCode.INVALID_REQUEST),
    "two maxima": ({"max_output_tokens": 1, "max_tokens": 2}, "max_tokens", ErrorCode.INVALID_REQUEST),
    "temperature": ({"temperature": -1}, "temperature", ErrorCode.INVALID_REQUEST),
    "top_logprobs": ({"top_logprobs": 21}, "top_logprobs", ErrorCode.INVALID_REQUEST),
    "effort": ({"reasoning": {"effort": "some"}}, "reasoning.effort", ErrorCode.INVALID_REQUEST),
    "summary": ({"reasoning": {"summary": "some"}}, "reasoning.summary", ErrorCode.INVALID_REQUEST),
    "verbosity": ({"text": {"verbosity": "some"}}, "text.verbosity", ErrorCode.INVALID_REQUEST),
    "format": ({"text": {"format": {"type": "xml"}}}, "text.format", ErrorCode.UNSUPPORTED),
    "schema": ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", ErrorCode.INVALID_REQUEST),
    "two formats": (
        {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
        "text.format",
        ErrorCode.INVALID_REQUEST,
    ),
    "metadata": ({"metadata": {"a": 1}}, "metadata", ErrorCode.INVALID_REQUEST),
    "much metadata": ({"metadata": {str(n): "" for n in range(17)}}, "metadata", ErrorCode.INVALID_REQUEST),
    "long metadata": ({"metadata": {"a": "x" * 513}}, "metadata", ErrorCode.INVALID_REQUEST),
    "tools": ({"tools": [{"name": "x"}]}, "tools[0].type", ErrorCode.INVALID_REQUEST),
    "a tool's name": ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", ErrorCode.INVALID_REQUEST),
    "a tool without one": ({"tools": [{"type": "function"}]}, "tools[0]", ErrorCode.INVALID_REQUEST),
    "a tool twice": ({"tools": [NOW, NOW]}, "tools[1]", ErrorCode.INVALID_REQUEST),
    "parameters": (
        {"tools": [NOW, {**NOW, "parameters": 5}]}, "tools[1].parameters", ErrorCode.INVALID_REQUEST
    ),
    "a grammar": (
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "grammar"}}]},
        "tools[0].format.definition",
        ErrorCode.INVALID_REQUEST,
    ),
    "a custom format": (
        {"tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]},
        "tools[0].format.type",
        ErrorCode.UNSUPPORTED,
    ),
    "a choice": ({"tools": [NOW], "tool_choice": "some"}, "tool_choice", ErrorCode.INVALID_REQUEST),
    "a tool that is not there": (
        {"tools": [NOW], "tool_choice": {"type": "function", "name": "x"}},
        "tool_choice.name",
        ErrorCode.INVALID_REQUEST,
    ),
    "a tool of OpenAI's": (
        {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "tool_choice",
        ErrorCode.UNSUPPORTED,
    ),
    "only tools of OpenAI's": (
        {"tools": [{"type": "web_search"}], "tool_choice": "required"},
        "tool_choice",
        ErrorCode.INVALID_REQUEST,
    ),
    "allowed tools": (
        {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "some", "tools": []}},
        "tool_choice.mode",
        ErrorCode.INVALID_REQUEST,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_responses_field_is_refused_by_name(name: str) -> None:
    fields, param, code = REFUSED[name]
    with pytest.raises(Refused) as refused:
        ask(**fields)
    failure = refused.value.failure
    assert (failure.param, failure.code) == (param, code)
    assert "\n" not in failure.message


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [[]]},
        {"input": {"role": "user"}},
        {"tools": {}},
        {"reasoning": []},
        {"previous_response_id": 5},
        {"input": [{"type": "mystery", "deep": json.loads("[" * 80 + "]" * 80)}]},
        {"tool_choice": {"type": "function", "name": "now", "x": json.loads("[" * 80 + "]" * 80)}, "tools": [NOW]},
        {"chat_template_kwargs": json.loads('{"a":' * 70 + "1" + "}" * 70)},
        {"input": [{"role": "user", "content": "x"}] * 10_001},
    ],
)  # fmt: skip
def test_responses_body_of_a_wrong_shape_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        ask(**fields)
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST


def test_responses_unknown_fields_are_refused_only_by_a_strict_server() -> None:
    ask(some_new_field=1, client_metadata={"a": 1}, context_management=[])
    ask(Manners(is_strict=True), client_metadata={"a": 1}, prompt_cache_retention="24h", service_tier="auto")
    with pytest.raises(Refused, match="max_output_tokens"):
        ask(Manners(is_strict=True), max_output_token=1)


def test_responses_repeat_what_they_were_asked_for() -> None:
    asked = ask(
        instructions="Be brief.", temperature=0.5, top_p=0.5, max_output_tokens=9, truncation="auto",
        metadata={"a": "b"}, user="u", safety_identifier="s", prompt_cache_key="k", store=False,
        reasoning={"effort": "low", "summary": "auto"}, parallel_tool_calls=False, max_tool_calls=3,
        tools=[WEATHER], tool_choice="required", top_logprobs=2, previous_response_id="resp_1",
        text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    )  # fmt: skip
    shown = json.loads(msgspec.json.encode(begun(Meta("1" * 32, 1, "m", asked))))
    expected = {
        "id": "resp_" + "1" * 32, "model": "m", "instructions": "Be brief.", "temperature": 0.5, "top_p": 0.5,
        "max_output_tokens": 9, "truncation": "auto", "metadata": {"a": "b"}, "user": "u",
        "safety_identifier": "s", "prompt_cache_key": "k", "store": False, "top_logprobs": 2,
        "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False, "max_tool_calls": 3,
        "tools": [{**WEATHER, "description": None}], "tool_choice": "required", "previous_response_id": "resp_1",
        "text": {
            "format": {"type": "json_schema", "name": "n", "description": None, "schema": SCHEMA, "strict": True},
            "verbosity": "low",
        },
    }  # fmt: skip
    assert {key: shown[key] for key in expected} == expected


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)
right = st.fixed_dictionaries(
    {},
    optional={name: st.just(value) for name, (value, *_) in {
        "input": (["hi"],), "instructions": ("x",), "stream": (True,), "store": (False,), "tools": ([NOW, PATCH],),
        "tool_choice": ("auto",), "text": ({"format": {"type": "json_object"}},), "top_logprobs": (1,),
        "include": (["message.output_text.logprobs"],), "reasoning": ({"effort": "low"},), "metadata": ({"a": "b"},),
        "truncation": ("auto",), "max_output_tokens": (3,), "temperature": (0.5,), "seed": (1,), "stop": ("x",),
        "parallel_tool_calls": (False,), "user": ("u",), "background": (False,),
    }.items()},
)  # fmt: skip
wrong = st.dictionaries(
    st.sampled_from([field.name for field in msgspec.structs.fields(responses.ResponsesBody)]),
    values,
    max_size=3,
)
parts = st.fixed_dictionaries(
    {"type": st.sampled_from(["input_text", "output_text", "refusal", "input_image", "x"])},
    optional={"text": st.text(max_size=3) | values, "refusal": st.text(max_size=3)},
)
items = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(
            ["message", "function_call", "function_call_output", "reasoning", "custom_tool_call",
             "custom_tool_call_output", "item_reference", "web_search_call"]
        ) | values,
        "role": st.sampled_from(["user", "assistant", "developer", "tool"]) | values,
        "content": st.text(max_size=3) | st.lists(parts, max_size=2) | values,
        "summary": st.lists(parts, max_size=2) | values,
        "id": st.text(max_size=3) | values,
        "call_id": st.text(max_size=3) | values,
        "name": st.text(max_size=3) | values,
        "arguments": st.text(max_size=3) | values,
        "input": st.text(max_size=3) | values,
        "output": st.text(max_size=3) | st.lists(parts, max_size=2) | values,
    },
)  # fmt: skip


@settings(max_examples=300)
@given(right, wrong, st.none() | st.lists(items, max_size=3), st.booleans())
def test_responses_any_fields_give_a_request_or_a_typed_refusal(
    good: dict[str, Any], bad: dict[str, Any], given_items: list[Any] | None, is_strict: bool
) -> None:
    body = good | bad | ({} if given_items is None else {"input": given_items})
    found = tried(body, Manners(is_strict))
    if isinstance(found, Failure):
        assert found.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED, ErrorCode.NOT_FOUND)
        assert "\n" not in found.message
        return
    assert chat(found).messages
    [request] = found.to_generate("r", 1)
    msgspec.json.encode(request)
    msgspec.json.encode(begun(Meta("1" * 32, 1, "m", found)))


def tried(body: dict[str, Any], manners: Manners) -> ResponsesRequest | Failure:
    try:
        return responses.decode(json.dumps(body).encode(), manners)
    except Refused as refused:
        return refused.failure


def test_a_fault_of_the_prompt_is_one_of_input() -> None:
    for param in ("messages", "messages[3]"):
        failure = Failure(ErrorCode.CONTEXT_EXCEEDED, "too long", param=param)
        status, body = responses.PROTOCOL.error(failure, "")
        assert (status, json.loads(body)["error"]["param"]) == (400, "input")
    other = Failure(ErrorCode.INVALID_REQUEST, "no", param="tools")
    assert json.loads(responses.PROTOCOL.error(other, "")[1])["error"]["param"] == "tools"
