"""What OpenAI's two formats read from a body: every field into our words, and what is refused by which name."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.protocols.base import DecodedRequest, Manners
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import completions as openai_completions
from parent.protocols.openai.fields import IGNORED, MAX_CHOICES
from shared import wire
from shared.errors import ErrorCode, Failure, Refused

USER = {"role": "user", "content": "hi"}
OWN = {"role": "assistant", "content": "It is"}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
STRICT = Manners(is_strict=True)


def chat(**fields: Any) -> DecodedRequest:
    return openai_chat.decode(json.dumps({"messages": [USER]} | fields).encode())


def text(**fields: Any) -> DecodedRequest:
    return openai_completions.decode(json.dumps({"prompt": "x"} | fields).encode())


def refusal(ask: Any, **fields: Any) -> Failure:
    with pytest.raises(Refused) as caught:
        ask(**fields)
    return caught.value.failure


# ---------------------------------------------------------------- sampling

SAMPLING: list[tuple[dict[str, Any], wire.Sampling]] = [
    ({"presence_penalty": -2, "frequency_penalty": 2}, wire.Sampling(presence_penalty=-2, frequency_penalty=2)),
    (
        {"presence_context_size": 5, "frequency_context_size": 0, "repetition_context_size": 10**30},
        wire.Sampling(presence_window=5, frequency_window=0, repetition_window=2**63 - 1),
    ),
    ({"repetition_penalty": 1.1}, wire.Sampling(repetition_penalty=1.1)),
    ({"repeat_penalty": 1.1}, wire.Sampling(repetition_penalty=1.1)),
    ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, wire.Sampling(repetition_penalty=1.1)),
    ({"xtc_probability": 1, "xtc_threshold": 0.5}, wire.Sampling(xtc_probability=1, xtc_threshold=0.5)),
    ({"min_p": 0.1, "top_k": 3}, wire.Sampling(min_p=0.1, top_k=3)),
    ({"logit_bias": {"5": -100, "007": 1.5, "9": 0}}, wire.Sampling(logit_bias={5: -100.0, 7: 1.5})),
    ({"hlg": {}}, wire.Sampling(tone=wire.Hlg())),
    (
        {"hlg": {"enabled": True, "width": 1, "shoulder": 2, "toe": 3, "pivot_offset": 5, "pivot": "median"}},
        wire.Sampling(tone=wire.Hlg(1, 2, 3, 5, "median")),
    ),
    ({"curve": {"points": [[0, 0], [50, 20]]}}, wire.Sampling(tone=wire.Curve(((0, 0), (50, 20))))),
    ({"curve": {"points": [[0, 0], [9, 9]], "floor": -9}, "hlg": {"enabled": False}},
     wire.Sampling(tone=wire.Curve(((0, 0), (9, 9)), -9))),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), SAMPLING)
@pytest.mark.parametrize("ask", [chat, text])
def test_openai_sampling_fields_and_their_other_names_arrive(
    ask: Any, fields: Any, expected: wire.Sampling
) -> None:
    assert ask(**fields).sampling == expected


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"presence_penalty": 2.1}, "presence_penalty", "from -2 to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty", "from 0.001"),
    ({"repetition_penalty": 1.2, "repeat_penalty": 1.3}, "repeat_penalty", "another name"),
    ({"presence_context_size": -1}, "presence_context_size", "0 (all tokens)"),
    ({"xtc_probability": 1.1}, "xtc_probability", "from 0 to 1"),
    ({"xtc_threshold": 0.6}, "xtc_threshold", "from 0 to 0.5"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "'-1'"),
    ({"logit_bias": {"²": 1}}, "logit_bias", "number of a token"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "number of a token"),
    ({"logit_bias": {"5": "1"}}, "logit_bias", "Expected `float`"),
    ({"hlg": {"toe": 0}}, "hlg.toe", "from 0.001"),
    ({"hlg": {"pivot": "mean"}}, "hlg.pivot", "median"),
    ({"hlg": {}, "curve": {"points": [[0, 0], [1, 1]]}}, "curve", "not both"),
    ({"curve": {"points": [[0, 0]]}}, "curve.points", "from 2 to 64"),
    ({"curve": {"points": [[0, 0], [0, 1]]}}, "curve.points", "x must rise"),
    ({"curve": {"points": [[0, 5], [1, 4]]}}, "curve.points", "y must not fall"),
    ({"curve": {"points": [[0, 0], [1e9, 1]]}}, "curve.points", "percent"),
    ({"curve": {"points": [[0, 0], [1]]}}, "curve.points[1]", "length 2"),
    ({"curve": {"points": [[0, 0], [1, 1]], "floor": 0}}, "curve.floor", "from -1000"),
    ({"n": MAX_CHOICES + 1}, "n", "at most 64"),
    ({"n": 10**400}, "n", "at most 64"),
    ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "Expected `bool | null`"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG)
@pytest.mark.parametrize("ask", [chat, text])
def test_openai_fields_out_of_range_are_refused_by_name(ask: Any, fields: Any, param: str, says: str) -> None:
    failure = refusal(ask, **fields)
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert says in failure.message
    assert len(failure.message) < 300


# ---------------------------------------------------------------- the form of an answer

GRAMMARS: list[tuple[dict[str, Any], wire.Grammar]] = [
    ({"response_format": {"type": "json_object"}}, wire.JsonObject()),
    ({"response_format": {"type": "json_object", "schema": OBJECT}}, wire.JsonSchema(OBJECT)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT, "strict": True}}},
        wire.JsonSchema(OBJECT),
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, wire.JsonObject()),
    ({"guided_json": OBJECT}, wire.JsonSchema(OBJECT)),
    ({"guided_json": json.dumps(OBJECT)}, wire.JsonSchema(OBJECT)),
    ({"guided_json": True}, wire.JsonSchema(True)),
    ({"guided_regex": "a+"}, wire.Regex("a+")),
    ({"guided_choice": ["a", "b"]}, wire.Choice(["a", "b"])),
    ({"guided_grammar": 'root ::= "x"'}, wire.ContextFree('root ::= "x"')),
    ({"grammar": 'root ::= "x"'}, wire.ContextFree('root ::= "x"')),
    ({"json_schema": OBJECT}, wire.JsonSchema(OBJECT)),
    ({"structured_outputs": {"json": OBJECT}}, wire.JsonSchema(OBJECT)),
    ({"structured_outputs": {"regex": "a"}}, wire.Regex("a")),
    ({"structured_outputs": {"choice": ["a"]}}, wire.Choice(["a"])),
    ({"structured_outputs": {"grammar": "start: /a/"}}, wire.ContextFree("start: /a/")),
    ({"structured_outputs": {"json_object": True}}, wire.JsonObject()),
    ({"guided_json": OBJECT, "structured_outputs": {"json": OBJECT}}, wire.JsonSchema(OBJECT)),
    ({"response_format": {"type": "text"}, "guided_regex": "a"}, wire.Regex("a")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), GRAMMARS)
@pytest.mark.parametrize("ask", [chat, text])
def test_openai_forms_of_an_answer_under_all_their_names(
    ask: Any, fields: Any, expected: wire.Grammar
) -> None:
    assert ask(**fields).grammar == expected


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else 1


NO_GRAMMAR: list[tuple[dict[str, Any], ErrorCode, str]] = [
    ({"response_format": {"type": "yaml"}}, ErrorCode.UNSUPPORTED, "response_format"),
    ({"response_format": {"type": "json_schema"}}, ErrorCode.INVALID_REQUEST, "response_format.json_schema"),
    ({"response_format": {}}, ErrorCode.INVALID_REQUEST, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": deep(70)}}},
        ErrorCode.INVALID_REQUEST,
        "response_format.json_schema.schema",
    ),
    ({"guided_json": "{"}, ErrorCode.INVALID_REQUEST, "guided_json"),
    ({"guided_json": "[" * 100_000}, ErrorCode.INVALID_REQUEST, "guided_json"),
    ({"guided_json": "[1]"}, ErrorCode.INVALID_REQUEST, "guided_json"),
    ({"guided_choice": []}, ErrorCode.INVALID_REQUEST, "guided_choice"),
    ({"guided_choice": ["a", 1]}, ErrorCode.INVALID_REQUEST, "guided_choice[1]"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, ErrorCode.INVALID_REQUEST, "guided_choice"),
    (
        {"response_format": {"type": "json_object"}, "guided_json": OBJECT},
        ErrorCode.INVALID_REQUEST,
        "guided_json",
    ),
    (
        {"structured_outputs": {"structural_tag": {}}},
        ErrorCode.UNSUPPORTED,
        "structured_outputs.structural_tag",
    ),
]


@pytest.mark.parametrize(("fields", "code", "param"), NO_GRAMMAR)
def test_openai_forms_that_cannot_be_or_contradict_are_refused(
    fields: Any, code: ErrorCode, param: str
) -> None:
    failure = refusal(chat, **fields)
    assert (failure.code, failure.param) == (code, param)


# ---------------------------------------------------------------- choices, log-probabilities, usage


def test_openai_answers_to_several_prompts_are_numbered_prompt_by_prompt() -> None:
    asked = text(prompt=["a", [1, 2]], n=2, seed=5)
    requests = asked.to_generate("id", 99)
    assert [request.prompt for request in requests] == [
        wire.TextPrompt("a"), wire.TextPrompt("a"), wire.TokenPrompt([1, 2]), wire.TokenPrompt([1, 2])
    ]  # fmt: skip
    assert [request.seed for request in requests] == [5, 6, 7, 8]
    assert len({request.request_id for request in requests}) == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * (MAX_CHOICES + 1)}, "prompt"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [[1], ["a"]]}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 10**400}, "logprobs"),
    ],
)
def test_openai_prompts_and_logprobs_out_of_range_are_refused(fields: Any, param: str) -> None:
    failure = refusal(text, **fields)
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"echo": True, "logprobs": 0}, "logprobs"),
    ],
)
def test_openai_completion_fields_that_are_not_here_are_refused_by_name(fields: Any, param: str) -> None:
    failure = refusal(text, **fields)
    assert (failure.code, failure.param) == (ErrorCode.UNSUPPORTED, param)


def test_openai_echo_and_best_of_that_changes_nothing() -> None:
    asked = text(echo=True, best_of=2, n=2)
    assert (asked.echo, asked.n) == (True, 2)
    assert all(request.echo for request in asked.to_generate("id", 1))


@pytest.mark.parametrize(
    ("ask", "fields", "expected"),
    [
        (chat, {}, None),
        (chat, {"logprobs": True}, 0),
        (chat, {"logprobs": True, "top_logprobs": 20}, 20),
        (chat, {"logprobs": False, "top_logprobs": 0}, None),
        (text, {"logprobs": False}, None),
        (text, {"logprobs": 0}, 0),
        (text, {"logprobs": True}, 0),
        (text, {"logprobs": 5}, 5),
    ],
)
def test_openai_logprobs_are_a_number_of_likely_tokens_or_none(
    ask: Any, fields: Any, expected: int | None
) -> None:
    assert ask(**fields).logprobs == expected


@pytest.mark.parametrize("fields", [{"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}])
def test_openai_top_logprobs_need_logprobs_and_have_a_bound(fields: Any) -> None:
    assert refusal(chat, **fields).param == "top_logprobs"


def test_openai_stream_options_arrive() -> None:
    asked = chat(stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (asked.include_usage, asked.usage_with_every_chunk) == (True, True)


# ---------------------------------------------------------------- thinking


@pytest.mark.parametrize(
    ("fields", "kwargs", "budget"),
    [
        ({"thinking_budget": 5}, {}, 5),
        ({"thinking_token_budget": 0}, {}, 0),
        ({"reasoning": {"max_tokens": 10**30}}, {}, 2**63 - 1),
        ({"thinking_budget": 5, "reasoning": {"max_tokens": 5}}, {}, 5),
        ({"reasoning": {"effort": "max"}}, {"enable_thinking": True, "reasoning_effort": "max"}, None),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}, None),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False, "reasoning_effort": "none"}, None),
        (
            {"reasoning": {"effort": "low"}, "reasoning_effort": "low"},
            {"enable_thinking": True, "reasoning_effort": "low"},
            None,
        ),
    ],
)
def test_openai_thinking_has_an_effort_and_a_budget(fields: Any, kwargs: Any, budget: int | None) -> None:
    asked = chat(**fields)
    assert isinstance(asked.prompts[0], wire.ChatPrompt)
    assert asked.prompts[0].template_kwargs == kwargs
    assert asked.thinking_budget == budget


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"thinking_budget": 1, "thinking_token_budget": 2}, "thinking_token_budget"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
    ],
)
def test_openai_thinking_that_contradicts_itself_is_refused(fields: Any, param: str) -> None:
    assert refusal(chat, **fields).param == param


# ---------------------------------------------------------------- an answer that is begun


@pytest.mark.parametrize(
    ("messages", "fields", "left", "goes_on"),
    [
        ([USER], {}, 1, False),
        ([USER, OWN], {}, 2, True),
        ([USER, OWN], {"continue_final_message": True, "add_generation_prompt": False}, 2, True),
        ([USER, OWN], {"add_generation_prompt": False}, 2, True),
        ([USER, OWN], {"add_generation_prompt": True}, 2, False),
        ([USER, OWN], {"continue_final_message": False}, 2, False),
        ([USER, {"role": "assistant", "content": ""}], {}, 1, False),
        ([USER, {"role": "assistant", "content": None}], {}, 1, False),
        ([{"role": "assistant", "content": ""}], {}, 1, True),
        ([USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}], {}, 2, True),
        (
            [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
            {},
            2,
            False,
        ),
    ],
)
def test_openai_chat_continues_a_final_message_of_the_assistant(
    messages: Any, fields: Any, left: int, goes_on: bool
) -> None:
    prompt = chat(messages=messages, **fields).prompts[0]
    assert isinstance(prompt, wire.ChatPrompt)
    assert (len(prompt.messages), prompt.continue_final) == (left, goes_on)


@pytest.mark.parametrize(
    ("messages", "fields", "param"),
    [
        ([USER], {"continue_final_message": True}, "continue_final_message"),
        (
            [USER, OWN],
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt",
        ),
        ([USER], {"add_generation_prompt": False}, "add_generation_prompt"),
        (
            [USER, OWN],
            {"add_generation_prompt": False, "continue_final_message": False},
            "add_generation_prompt",
        ),
    ],
)
def test_openai_chat_refuses_a_continuation_that_cannot_be(messages: Any, fields: Any, param: str) -> None:
    assert refusal(chat, messages=messages, **fields).param == param


# ---------------------------------------------------------------- strictness

STRICTLY_WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temprature": 1}, "temprature", "did you mean temperature?"),
    ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "include_usage?"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]}, "tools[0].function.parameter",
     "parameters?"),
    ({"tool_choice": {"type": "function", "function": {"name": "f", "x": 1}}, "tools": [{"function": {"name": "f"}}]},
     "tool_choice.function.x", "leave it out"),
    ({"response_format": {"type": "json_schema", "json_schema": {"shema": {}}}}, "response_format.json_schema.shema",
     "schema?"),
    ({"x" * 5000: 1}, "x" * 40, "not known"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "says"), STRICTLY_WRONG)
def test_openai_unknown_fields_are_refused_by_a_strict_server_only(
    fields: Any, param: str, says: str
) -> None:
    body = json.dumps({"messages": [USER]} | fields).encode()
    assert openai_chat.decode(body).prompts
    failure = refusal(openai_chat.decode, body=body, manners=STRICT)
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert says in failure.message


def test_openai_fields_that_do_nothing_are_known_to_a_strict_server() -> None:
    schema = {"anything": {"goes": []}}
    body = {
        "messages": [USER | {"x": 1}],
        "metadata": schema,
        "chat_template_kwargs": schema,
        "guided_json": schema,
    }
    body |= dict.fromkeys(IGNORED, schema)
    assert openai_chat.decode(json.dumps(body).encode(), STRICT).grammar == wire.JsonSchema(schema)


# ---------------------------------------------------------------- whatever comes

BODIES = (openai_chat.ChatBody, openai_completions.TextBody)
NAMES = sorted(
    {field.name for kind in BODIES for field in msgspec.structs.fields(kind)} - {"messages", "prompt"}
)
KEYS = [
    "type", "function", "name", "parameters", "schema", "json_schema", "strict", "allowed_tools", "mode", "tools",
    "effort", "max_tokens", "points", "enabled", "width", "5", "json", "regex", "include_usage", "properties", "$ref",
]  # fmt: skip
WORDS = [
    "auto",
    "required",
    "none",
    "function",
    "allowed_tools",
    "text",
    "json_object",
    "json_schema",
    "f",
    "low",
]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([2**63, -(2**64), 10**400])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), st.booleans())
def test_openai_fields_with_any_values_give_a_request_or_a_refusal(
    fields: dict[str, Any], strict: bool
) -> None:
    for decode, rest in (
        (openai_chat.decode, {"messages": [USER]}),
        (openai_completions.decode, {"prompt": "x"}),
    ):
        with contextlib.suppress(Refused):
            asked = decode(json.dumps(rest | fields).encode(), Manners(is_strict=strict))
            for request in asked.to_generate("id", 1):
                again = msgspec.json.decode(msgspec.json.encode(request), type=wire.GenerateRequest)
                assert again.tool_choice == request.tool_choice


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_openai_text_of_any_characters_passes_through(said: str) -> None:
    prompt = chat(messages=[{"role": "user", "content": said}, {"role": "user", "content": "x\0y"}]).prompts[
        0
    ]
    assert isinstance(prompt, wire.ChatPrompt)
    assert [message["content"] for message in prompt.messages] == [said, "x\0y"]
    if said:
        assert text(prompt=said).prompts[0] == wire.TextPrompt(said)


def test_openai_of_a_key_that_stands_twice_the_last_one_counts() -> None:
    body = b'{"messages":[],"messages":[{"role":"user","content":"a","content":"b"}],"seed":1,"seed":2}'
    asked = openai_chat.decode(body)
    assert asked.seed == 2
    assert isinstance(asked.prompts[0], wire.ChatPrompt)
    assert asked.prompts[0].messages[0]["content"] == "b"


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":1e400}}',
        b'{"messages":[{"role":"user","content":"x","y":' + b"9" * 5000 + b"}]}",
        b'{"messages":[{"role":"user","content":"\\udc00"}]}',
        b'{"messages":[' + b'{"role":"user","content":"x"},' * 99_000 + b'{"role":"user","content":"x"}]}',
    ],
)
def test_openai_bodies_that_cannot_be_read_are_refused(body: bytes) -> None:
    assert refusal(openai_chat.decode, body=body).code is ErrorCode.INVALID_REQUEST
