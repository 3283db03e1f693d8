"""Bodies of `/v1/messages`: what each field and block becomes, and what is refused by which name."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.protocols.anthropic import request as anthropic
from parent.protocols.anthropic.request import KnownFields
from parent.protocols.base import DecodedRequest, Manners
from shared import wire
from shared.errors import ErrorCode, Failure, Refused

USER = {"role": "user", "content": "hi"}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "f", "description": "does", "input_schema": OBJECT}
CALL = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
PLAIN, STRICT = Manners(), Manners(is_strict=True)


def ask(manners: Manners = PLAIN, **fields: Any) -> DecodedRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [USER]} | fields
    return anthropic.decode(json.dumps(body).encode(), manners)


def prompt(**fields: Any) -> wire.ChatPrompt:
    [found] = ask(**fields).prompts
    assert isinstance(found, wire.ChatPrompt)
    return found


def said(*blocks: Any, role: str = "user") -> list[dict[str, Any]]:
    """Messages of the internal form that one turn becomes."""
    return prompt(messages=[USER, {"role": role, "content": list(blocks)}]).messages[1:]


def refusal(manners: Manners = PLAIN, **fields: Any) -> Failure:
    with pytest.raises(Refused) as caught:
        ask(manners, **fields)
    return caught.value.failure


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words} | more


def result(content: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": content} | more


# ---------------------------------------------------------------- messages

SYSTEMS: list[tuple[Any, list[str]]] = [
    (None, []),
    ("", []),
    ([], []),
    ("be brief", ["be brief"]),
    ([text("one", cache_control={"type": "ephemeral"}), text("two")], ["one\ntwo"]),
    ([text("x-anthropic-billing-header: cc_version=2; cch=1;"), text("You are")], ["You are"]),
    ("x-anthropic-billing-header: cch=2;\nYou are", ["You are"]),
    ("speak of x-anthropic-billing-header: it is", ["speak of x-anthropic-billing-header: it is"]),
]


@pytest.mark.parametrize(("system", "expected"), SYSTEMS)
def test_anthropic_system_is_the_first_message_and_no_accounting(system: Any, expected: list[str]) -> None:
    messages = prompt(system=system).messages
    assert [each["content"] for each in messages if each["role"] == "system"] == expected
    assert messages[-1] == USER


def test_anthropic_a_string_and_one_text_block_are_the_same_prompt() -> None:
    """bugs.md A3."""
    for role in ("user", "assistant", "system"):
        blocks = prompt(messages=[USER, {"role": role, "content": [text("so")]}, USER])
        assert blocks == prompt(messages=[USER, {"role": role, "content": "so"}, USER])
    assert said(text("one"), text("two", citations=[])) == [{"role": "user", "content": "one\ntwo"}]


DOCUMENT = {
    "type": "document", "title": "T", "context": "C",
    "source": {"type": "text", "media_type": "text/plain", "data": "body"},
}  # fmt: skip
TEXTS: list[tuple[dict[str, Any], str]] = [
    (DOCUMENT, "T\nC\nbody"),
    ({"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}, "a\nb"),
    ({"type": "document", "source": {"type": "content", "content": "ab"}}, "ab"),
    ({"type": "search_result", "source": "url", "title": "T", "content": [text("a")]}, "T\nurl\na"),
    (text(""), ""),
    (text("a\x00👩‍👩‍👧"), "a\x00👩‍👩‍👧"),
]


@pytest.mark.parametrize(("block", "expected"), TEXTS)
def test_anthropic_blocks_with_words_are_text_in_a_turn_and_in_a_result(block: Any, expected: str) -> None:
    assert said(block) == [{"role": "user", "content": expected}]
    [answer] = said(result([block]))
    assert answer == {"role": "tool", "tool_call_id": "t1", "content": expected}


def test_anthropic_results_of_tools_stand_in_order_before_the_text_of_their_turn() -> None:
    blocks = [result("one"), text("and now?"), result([text("a"), text("b")], tool_use_id="t2")]
    assert said(*blocks) == [
        {"role": "tool", "tool_call_id": "t1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "a\nb"},
        {"role": "user", "content": "and now?"},
    ]
    assert [each["role"] for each in said(result("one"))] == ["tool"]


@pytest.mark.parametrize(
    ("content", "is_error", "expected"),
    [
        ("no such file", True, "Error: no such file"),
        ("Error: no such file", True, "Error: no such file"),
        ("<tool_use_error>no</tool_use_error>", True, "<tool_use_error>no</tool_use_error>"),
        (None, True, "Error"),
        ("fine", False, "fine"),
        (None, None, ""),
        ([], None, ""),
        ([{"type": "tool_reference", "tool_name": "f"}], None, "f"),
    ],
)
def test_anthropic_a_result_says_that_it_is_an_error(content: Any, is_error: Any, expected: str) -> None:
    assert said(result(content, is_error=is_error))[0]["content"] == expected


def test_anthropic_a_turn_of_the_assistant_is_one_message() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm. ", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        text("I look."),
        CALL,
        {**CALL, "id": "t2", "input": {}},
    ]
    [message] = said(*blocks, role="assistant")
    assert message["content"] == "I look."
    assert message["reasoning_content"] == "Hm. "
    assert [call["id"] for call in message["tool_calls"]] == ["t1", "t2"]
    functions = [call["function"] for call in message["tool_calls"]]
    assert [json.loads(each["arguments"]) for each in functions] == [{"a": 1}, {}]
    [alone] = said(CALL, role="assistant")  # bugs.md A1
    assert (alone["content"], len(alone["tool_calls"])) == ("", 1)


@pytest.mark.parametrize("written", ['{"a": 1e400}', '{"b":{}, "a" : [1,\t2.50]}', ""])
def test_anthropic_the_input_of_a_past_call_stays_as_it_was_written(written: str) -> None:
    given = f', "input": {written}' if written else ""
    body = (
        '{"max_tokens": 9, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": '
        f'[{{"type": "tool_use", "id": "t1", "name": "f"{given}}}]}}]}}'
    )
    [found] = anthropic.decode(body.encode()).prompts
    assert isinstance(found, wire.ChatPrompt)
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == (written or "{}")


@pytest.mark.parametrize(
    ("last", "goes_on", "count"),
    [
        ({"role": "assistant", "content": "It is"}, True, 2),
        ({"role": "assistant", "content": [text("It is")]}, True, 2),
        ({"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm"}]}, True, 2),
        ({"role": "assistant", "content": ""}, False, 1),
        ({"role": "assistant", "content": []}, False, 1),
        ({"role": "assistant", "content": [CALL]}, False, 2),
        (USER, False, 2),
    ],
)
def test_anthropic_a_last_turn_of_the_assistant_goes_on(last: Any, goes_on: bool, count: int) -> None:
    found = prompt(messages=[USER, last])
    assert (found.continue_final, len(found.messages)) == (goes_on, count)


# ---------------------------------------------------------------- fields


def test_anthropic_all_fields_arrive() -> None:
    asked = ask(
        stream=True, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, max_tokens=7, seed=5,
        stop_sequences=["a", "b", "c", "d", "e"], metadata={"user_id": "x"}, service_tier="auto",
        context_management={"edits": []}, mcp_servers=[], container=None, keep_alive=0,
    )  # fmt: skip
    assert (asked.model, asked.stream, asked.max_tokens, asked.seed) == ("m", True, 7, 5)
    assert asked.sampling == wire.Sampling(0.5, 0.9, 4, 0.1)
    assert (asked.stop, asked.keep_alive_s) == (["a", "b", "c", "d", "e"], 0)
    assert len(asked.to_generate("id", 1)) == 1


THINKING: list[tuple[dict[str, Any], dict[str, Any], int | None]] = [
    ({}, {}, None),
    ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, {"enable_thinking": True}, 2048),
    ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}, None),
    ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
    ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"enable_thinking": True}, None),
    ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}, None),
    (
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        {"enable_thinking": True, "reasoning_effort": "low"},
        None,
    ),
    ({"thinking": None, "output_config": {"effort": None}}, {}, None),
]


@pytest.mark.parametrize(("fields", "kwargs", "budget"), THINKING)
def test_anthropic_thinking_becomes_arguments_and_a_budget(
    fields: Any, kwargs: Any, budget: int | None
) -> None:
    asked = ask(**fields)
    [found] = asked.prompts
    assert isinstance(found, wire.ChatPrompt)
    assert (found.template_kwargs, asked.thinking_budget) == (kwargs, budget)


CHOICES: list[tuple[dict[str, Any] | None, list[str], wire.ToolChoice]] = [
    (None, ["f", "g"], wire.ToolChoice()),
    ({"type": "auto"}, ["f", "g"], wire.ToolChoice()),
    ({"type": "auto", "disable_parallel_tool_use": True}, ["f", "g"], wire.ToolChoice(parallel=False)),
    ({"type": "any"}, ["f", "g"], wire.ToolChoice("required")),
    ({"type": "tool", "name": "g"}, ["f", "g"], wire.ToolChoice("required", "g")),
    (
        {"type": "tool", "name": "g", "disable_parallel_tool_use": True},
        ["f", "g"],
        wire.ToolChoice("required", "g", False),
    ),
    ({"type": "none"}, [], wire.ToolChoice()),
]


@pytest.mark.parametrize(("choice", "names", "expected"), CHOICES)
def test_anthropic_choices_of_tools(choice: Any, names: list[str], expected: wire.ToolChoice) -> None:
    tools = [TOOL | {"strict": True}, {"type": "custom", "name": "g", "input_schema": {}}]
    asked = ask(tools=tools, tool_choice=choice)
    [found] = asked.prompts
    assert isinstance(found, wire.ChatPrompt)
    assert [tool.name for tool in found.tools] == names
    assert asked.tool_choice == expected
    if names:
        assert found.tools == [wire.Tool("f", "does", OBJECT, True), wire.Tool("g")]


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_anthropic_the_form_of_an_answer(name: str) -> None:
    form = {"type": "json_schema", "schema": OBJECT}
    asked = ask(**{name: {"format": form} if name == "output_config" else form})
    assert asked.grammar == wire.JsonSchema(OBJECT)
    assert ask(output_config={"format": form}, output_format=form) == asked


# ---------------------------------------------------------------- what is refused


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else 1


def turn(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "must be there"),
    ({"max_tokens": 0}, "max_tokens", "1 or more"),
    ({"max_tokens": "9"}, "max_tokens", "Expected `int | null`"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "missing required field `content`"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "Expected"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", "Expected `object`"),
    (turn({"text": "x"}), "messages[1].content[0]", "missing required field `type`"),
    (turn({"type": "text"}), "messages[1].content[0].text", "must be a string"),
    (turn(CALL), "messages[1].content[0].type", "no place here"),
    (turn(result(), role="assistant"), "messages[1].content[0].type", "no place here"),
    (turn(result(tool_use_id=None)), "messages[1].content[0].tool_use_id", "must be there"),
    (turn(CALL | {"input": [1]}, role="assistant"), "messages[1].content[0].input", "an object"),
    (turn(CALL | {"name": ""}, role="assistant"), "messages[1].content[0].name", "name of the tool"),
    (turn(CALL | {"id": None}, role="assistant"), "messages[1].content[0].id", "tool_use_id"),
    ({"system": [{"type": "text"}]}, "system[0].text", "must be a string"),
    ({"system": 5}, "system", "Expected"),
    ({"temperature": 6}, "temperature", "from 0 to 5"),
    ({"top_k": -1}, "top_k", "0 (off)"),
    ({"stop_sequences": [""]}, "stop_sequences", "not be empty"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences", "at most 64"),
    ({"thinking": {"type": "big"}}, "thinking.type", "'big'"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens", "1 or more"),
    ({"output_config": {"effort": "minimal"}}, "output_config.effort", "'minimal'"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema", "must be there"),
    (
        {"output_format": {"type": "json_schema", "schema": deep(70)}},
        "output_format.schema",
        "deep in each other",
    ),
    (
        {
            "output_format": {"type": "json_schema", "schema": {}},
            "output_config": {"format": {"type": "json_schema", "schema": OBJECT}},
        },
        "output_format",
        "something else",
    ),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "must be there"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name", "must be there"),
    ({"tools": [TOOL, TOOL]}, "tools[1]", "already"),
    ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name", "'a b'"),
    ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, "tools[0].input_schema", "'string'"),
    ({"tools": [TOOL | {"input_schema": deep(70)}]}, "tools[0].input_schema", "deep in each other"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "without tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "'g'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "must be the name"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type", "'required'"),
    ({"seed": 2**70}, "seed", "64 bits"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG)
def test_anthropic_what_is_wrong_is_named(fields: dict[str, Any], param: str, says: str) -> None:
    failure = refusal(**fields)
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert says in failure.message
    assert "\n" not in failure.message
    assert len(failure.message) < 300


SERVER_TOOLS = ("web_search_20250305", "bash_20250124", "text_editor_20250728", "computer_20250124")
NOT_HERE: list[tuple[dict[str, Any], str, str]] = [
    *(({"tools": [TOOL, {"type": each, "name": "x"}]}, "tools[1].type", each) for each in SERVER_TOOLS),
    (turn(text("see"), IMAGE), "messages[1].content[1]", "image"),
    (turn(result([IMAGE])), "messages[1].content[0].content[0]", "image"),
    (
        turn({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA"}}),
        "messages[1].content[0].source.type",
        "text only",
    ),
    (
        turn({"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, role="assistant"),
        "messages[1].content[0].type",
        "server tools are not run here",
    ),
    (
        turn({"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]}),
        "messages[1].content[0].type",
        "server tools are not run here",
    ),
    (turn({"type": "hologram"}), "messages[1].content[0].type", "'hologram'"),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers", "not supported"),
    ({"container": "c"}, "container", "not supported"),
    ({"output_format": {"type": "yaml"}}, "output_format.type", "json_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), NOT_HERE)
def test_anthropic_what_is_not_here_is_refused_by_name(fields: dict[str, Any], param: str, says: str) -> None:
    failure = refusal(**fields)
    assert (failure.code, failure.param) == (ErrorCode.UNSUPPORTED, param)
    assert says in failure.message


def test_anthropic_a_tool_with_a_schema_is_a_function_whatever_its_type() -> None:
    assert prompt(tools=[TOOL | {"type": "memory_20250818"}]).tools == [wire.Tool("f", "does", OBJECT)]


def test_anthropic_unknown_fields_are_ignored_or_refused_where_the_server_is_strict() -> None:
    assert ask(max_token=5) == ask()
    assert refusal(STRICT, max_token=5).param == "max_token"
    assert refusal(STRICT, thinking={"type": "disabled", "budget": 5}).param == "thinking.budget"
    ask(
        STRICT,
        messages=[{"role": "user", "content": [text("x", cache_control={"type": "ephemeral"}, news=1)]}],
        system=[text("x", cache_control=None)],
        tools=[TOOL | {"cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "x"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    )


def test_anthropic_the_fields_that_are_read_are_those_that_are_known() -> None:
    known = {field.name for field in msgspec.structs.fields(KnownFields)}
    assert {field.name for field in msgspec.structs.fields(anthropic.MessagesBody)} == known


def test_anthropic_a_count_needs_no_max_tokens_and_means_the_same_prompt() -> None:
    fields = {"messages": [USER], "system": "s", "tools": [TOOL], "thinking": {"type": "disabled"}}
    counted = anthropic.decode_count(json.dumps(fields).encode())
    assert counted.asked.prompts == ask(**fields).prompts
    assert counted.add_generation_prompt
    with pytest.raises(Refused, match="at least one"):
        anthropic.decode_count(b'{"messages": []}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"max_tokens": 9, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"max_tokens": 9, "messages": [{"role": "user", "content": ' + b"[" * 100_000,
        b'{"max_tokens": 9, "messages": '
        + b'[{"role":"user","content":[{"type":"tool_result","content":' * 5000,
        b'{"max_tokens":9,"messages":[{"role":"assistant","content":'
        b'[{"type":"tool_use","id":"a","name":"f","input":{"a":"\xff"}}]}]}',
        b'{"max_tokens":1e999,"messages":[]}',
        b'{"max_tokens": 9, "messages": [{"role": "user", "content": ['
        + b'{"type":"search_result","content":[' * 350
        + b"]}" * 350
        + b"]}]}",
    ],
)
def test_anthropic_hostile_bodies_are_refused(body: bytes) -> None:
    with pytest.raises(Refused) as caught:
        anthropic.decode(body)
    assert caught.value.failure.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED)


# ---------------------------------------------------------------- anything

blocks = st.fixed_dictionaries(
    {"type": st.sampled_from(
        ["text", "image", "document", "search_result", "tool_use", "tool_result", "thinking",
         "redacted_thinking", "server_tool_use", "x"])},
    optional={
        "text": st.text(max_size=3) | st.none(), "thinking": st.text(max_size=3),
        "id": st.text(max_size=3), "name": st.text(max_size=3), "input": st.just({}) | st.just({"a": [1]}),
        "tool_use_id": st.text(max_size=3), "is_error": st.booleans(), "title": st.text(max_size=3),
        "content": st.text(max_size=3) | st.just([text("x")]) | st.just({"type": "y"}),
        "source": st.text(max_size=3) | st.just({"type": "text", "data": "d"}) | st.just({"type": "url"}),
        "cache_control": st.just({"type": "ephemeral"}),
    },
)  # fmt: skip
contents = st.text(max_size=3) | st.lists(blocks, max_size=3)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": contents}),
        max_size=3)},
    optional={
        "model": st.text(max_size=3), "max_tokens": st.integers(-1, 10**30), "system": contents,
        "stop_sequences": st.lists(st.text(max_size=2), max_size=2), "stream": st.booleans(),
        "temperature": st.floats(-1, 6), "top_p": st.floats(0, 1), "top_k": st.integers(-1, 10**30),
        "tools": st.lists(st.just(TOOL) | st.just({"type": "bash_20250124", "name": "bash"}), max_size=2),
        "tool_choice": st.fixed_dictionaries(
            {"type": st.sampled_from(["auto", "any", "tool", "none"])}, optional={"name": st.just("f")}),
        "thinking": st.fixed_dictionaries(
            {"type": st.sampled_from(anthropic.THINKING)}, optional={"budget_tokens": st.integers(-1, 10**30)}),
        "output_config": st.fixed_dictionaries({}, optional={
            "effort": st.sampled_from(["low", "no"]), "format": st.just({"type": "json_schema", "schema": OBJECT})}),
        "metadata": st.just({}), "service_tier": st.just("auto"), "container": st.just("c"),
        "mcp_servers": st.just([]), "context_management": st.just({"edits": []}), "seed": st.integers(),
    },
)  # fmt: skip


@given(bodies, st.booleans())
def test_anthropic_any_subset_of_fields_is_a_request_or_a_typed_refusal(body: Any, strict: bool) -> None:
    failure = None
    try:
        asked = anthropic.decode(json.dumps(body).encode(), Manners(is_strict=strict))
    except Refused as refused:
        failure = refused.failure
    if failure is not None:
        assert failure.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED)
        assert "\n" not in failure.message
        return
    [request] = asked.to_generate("id", 1)
    sent = msgspec.json.decode(msgspec.json.encode(request), type=wire.GenerateRequest)
    assert sent == request  # the wire can carry it
    assert isinstance(request.prompt, wire.ChatPrompt)
    roles = {"system", "user", "assistant", "tool"}
    assert {message["role"] for message in request.prompt.messages} <= roles


@given(st.binary(max_size=100) | st.recursive(st.none() | st.text(max_size=3) | st.integers(), lambda inner:
       st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["messages", "role", "content", "type", "text",
       "tools", "input_schema", "thinking", "max_tokens", "system"]), inner)).map(
       lambda value: json.dumps(value).encode()))  # fmt: skip
def test_anthropic_no_body_whatever_raises_anything_but_refused(body: bytes) -> None:
    with contextlib.suppress(Refused):
        assert anthropic.decode(body).prompts
    with contextlib.suppress(Refused):
        assert anthropic.decode_count(body).asked.prompts
