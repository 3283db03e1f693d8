"""Tools of a chat: what may be offered, who has to be called, and the names that all this had before."""

import json
from typing import Any

import pytest

from parent.protocols.base import DecodedRequest
from parent.protocols.openai import chat as openai_chat
from shared import wire
from shared.errors import ErrorCode, Failure, Refused

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def decode(**fields: Any) -> DecodedRequest:
    return openai_chat.decode(json.dumps({"messages": [USER]} | fields).encode())


def offered(asked: DecodedRequest) -> list[wire.Tool]:
    assert isinstance(asked.prompts[0], wire.ChatPrompt)
    return asked.prompts[0].tools


def refusal(**fields: Any) -> Failure:
    with pytest.raises(Refused) as caught:
        decode(**fields)
    return caught.value.failure


F, G = function("f"), function("g")
AUTO = wire.ToolChoice()


def test_openai_tools_arrive_whole() -> None:
    asked = decode(tools=[function("get-a.b_1", description="says", parameters=PARAMETERS, strict=True), G])
    assert offered(asked) == [wire.Tool("get-a.b_1", "says", PARAMETERS, True), wire.Tool("g")]
    assert asked.tool_choice == AUTO
    assert not asked.as_function_call


CHOICES: list[tuple[dict[str, Any], list[str], wire.ToolChoice]] = [
    ({}, ["f", "g"], AUTO),
    ({"tool_choice": "auto"}, ["f", "g"], AUTO),
    ({"tool_choice": "none"}, [], AUTO),
    ({"tool_choice": "required"}, ["f", "g"], wire.ToolChoice("required")),
    ({"tool_choice": function("g")}, ["f", "g"], wire.ToolChoice("required", "g")),
    ({"parallel_tool_calls": False}, ["f", "g"], wire.ToolChoice(parallel=False)),
    (
        {"tool_choice": "required", "parallel_tool_calls": False},
        ["f", "g"],
        wire.ToolChoice("required", parallel=False),
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [G]}}},
        ["g"],
        AUTO,
    ),
    (
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [F]}}},
        ["f"],
        wire.ToolChoice("required"),
    ),
]


@pytest.mark.parametrize(("fields", "names", "choice"), CHOICES)
def test_openai_tool_choice_in_each_of_its_forms(
    fields: Any, names: list[str], choice: wire.ToolChoice
) -> None:
    asked = decode(tools=[F, G], **fields)
    assert [tool.name for tool in offered(asked)] == names
    assert asked.tool_choice == choice


WRONG: list[tuple[dict[str, Any], ErrorCode, str, str]] = [
    ({"tools": [function("")]}, ErrorCode.INVALID_REQUEST, "tools[0].function.name", "1 to 128"),
    ({"tools": [F, function("a b")]}, ErrorCode.INVALID_REQUEST, "tools[1].function.name", "'a b'"),
    ({"tools": [function("f\n")]}, ErrorCode.INVALID_REQUEST, "tools[0].function.name", "1 to 128"),
    ({"tools": [function("x" * 129)]}, ErrorCode.INVALID_REQUEST, "tools[0].function.name", "1 to 128"),
    ({"tools": [F, G, F]}, ErrorCode.INVALID_REQUEST, "tools[2]", "'f' already"),
    ({"tools": [{"type": "function"}]}, ErrorCode.INVALID_REQUEST, "tools[0].function", "an object"),
    ({"tools": [function("f", parameters=[])]}, ErrorCode.INVALID_REQUEST, "tools[0].function.parameters", "object"),
    (
        {"tools": [function("f", parameters={"type": "string"})]},
        ErrorCode.INVALID_REQUEST,
        "tools[0].function.parameters",
        "'string'",
    ),
    ({"tools": [function("f", strict="yes")]}, ErrorCode.INVALID_REQUEST, "tools[0].function.strict", "bool"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, ErrorCode.UNSUPPORTED, "tools[0].type", "'custom'"),
    ({"tools": [{"type": "web_search"}]}, ErrorCode.UNSUPPORTED, "tools[0].type", "'web_search'"),
    ({"tools": [F], "tool_choice": function("g")}, ErrorCode.INVALID_REQUEST, "tool_choice.function.name", "'g'"),
    ({"tools": [F], "tool_choice": "any"}, ErrorCode.INVALID_REQUEST, "tool_choice", "'any'"),
    ({"tool_choice": "required"}, ErrorCode.INVALID_REQUEST, "tool_choice", "without tools"),
    ({"tool_choice": function("f")}, ErrorCode.INVALID_REQUEST, "tool_choice.function.name", "without tools"),
    ({"tools": [F], "tool_choice": {}}, ErrorCode.INVALID_REQUEST, "tool_choice.function", "an object"),
    (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [G]}}},
        ErrorCode.INVALID_REQUEST,
        "tool_choice.allowed_tools.tools",
        "'g'",
    ),
    (
        {"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [F]}}},
        ErrorCode.INVALID_REQUEST,
        "tool_choice.allowed_tools.mode",
        "'any'",
    ),
    ({"tools": [F], "functions": [{"name": "g"}]}, ErrorCode.INVALID_REQUEST, "functions", "one of them"),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, ErrorCode.INVALID_REQUEST,
     "function_call.name", "'g'"),
    ({"functions": [{"name": "f"}], "function_call": "any"}, ErrorCode.INVALID_REQUEST, "function_call", "'any'"),
    ({"function_call": {"name": "f"}}, ErrorCode.INVALID_REQUEST, "function_call", "without functions"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "param", "says"), WRONG)
def test_openai_tools_that_cannot_be_are_refused_by_place(
    fields: Any, code: ErrorCode, param: str, says: str
) -> None:
    failure = refusal(**fields)
    assert (failure.code, failure.param) == (code, param)
    assert says in failure.message
    assert len(failure.message) < 300


def test_openai_tool_parameters_nested_too_deep_are_refused_and_recursive_ones_are_not() -> None:
    schema: Any = {"type": "object"}
    for _ in range(70):
        schema = {"type": "object", "properties": {"a": schema}}
    assert refusal(tools=[function("f", parameters=schema)]).param == "tools[0].function.parameters"
    recursive = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    assert offered(decode(tools=[function("f", parameters=recursive)]))[0].parameters == recursive


def test_openai_tools_may_be_ten_thousand() -> None:
    tools = [function(f"f{number}", parameters=PARAMETERS) for number in range(10_000)]
    assert len(offered(decode(tools=tools))) == 10_000


def test_openai_form_of_an_answer_that_has_to_be_a_call_does_not_matter() -> None:
    form = {"type": "json_object"}
    assert decode(tools=[F], response_format=form).grammar == wire.JsonObject()
    assert decode(tools=[F], response_format=form, tool_choice="required").grammar is None


# ---------------------------------------------------------------- functions


@pytest.mark.parametrize(
    ("call", "names", "choice"),
    [
        (None, ["f"], wire.ToolChoice(parallel=False)),
        ("auto", ["f"], wire.ToolChoice(parallel=False)),
        ("none", [], AUTO),
        ({"name": "f"}, ["f"], wire.ToolChoice("required", "f", parallel=False)),
    ],
)
def test_openai_functions_are_tools_of_which_one_is_called(call: Any, names: list[str], choice: Any) -> None:
    asked = decode(functions=[{"name": "f", "parameters": PARAMETERS}], function_call=call)
    assert [tool.name for tool in offered(asked)] == names
    assert asked.tool_choice == choice
    assert asked.as_function_call


def test_openai_function_calls_of_a_history_become_tool_calls() -> None:
    call = {"name": "f", "arguments": "{}"}
    history = [
        USER,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "f", "content": "5"},
    ]
    prompt = decode(messages=history).prompts[0]
    assert isinstance(prompt, wire.ChatPrompt)
    _, assistant, result = prompt.messages
    assert assistant["tool_calls"][0]["function"] == call
    assert "function_call" not in assistant
    assert (result["role"], result["content"]) == ("tool", "5")
    assert result["tool_call_id"] == assistant["tool_calls"][0]["id"]


@pytest.mark.parametrize("call", [5, "f", [], {}, {"arguments": "{}"}])
def test_openai_function_calls_of_a_history_without_a_name_are_refused(call: Any) -> None:
    history = [USER, {"role": "assistant", "content": "", "function_call": call}]
    assert refusal(messages=history).param == "messages[1].tool_calls[0]"
