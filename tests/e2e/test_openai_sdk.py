"""OpenAI's own SDK asks for each feature, streamed and not: both give the same, and what was asked for.

Against the fake worker, which calls tools, thinks and echoes as it is told, and against a real one on a tiny model,
which enforces what it is asked to.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.process.harness import Served, served

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"place": "Zürich }{ \\"東京\\"", "n": {"a": [1, {}]}}'
CALLS = [["get_weather", ARGUMENTS], ["now", "{}"]]


class Said(NamedTuple):
    """A choice, however it came."""

    text: str
    reason: str
    calls: Sequence[tuple[str, str]] = ()
    thought: str = ""
    logprobs: Any = None


class Got(NamedTuple):
    """An answer, however it came."""

    choices: list[Said]
    usage: tuple[int, int]
    fingerprint: str

    @property
    def only(self) -> Said:
        [choice] = self.choices
        return choice


def chat(client: openai.OpenAI, **asked: Any) -> Got:
    whole = client.chat.completions.create(**asked)
    said = [
        Said(
            choice.message.content or "",
            choice.finish_reason,
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            getattr(choice.message, "reasoning_content", None) or "",
            [entry.model_dump() for entry in choice.logprobs.content] if choice.logprobs else None,
        )
        for choice in whole.choices
    ]
    return Got(said, (whole.usage.prompt_tokens, whole.usage.completion_tokens), whole.system_fingerprint)


def streamed_chat(client: openai.OpenAI, **asked: Any) -> Got:
    """Put together by index and position, as clients do."""
    texts: dict[int, dict[str, Any]] = {}
    usage, fingerprints = [], set()
    for chunk in client.chat.completions.create(**asked, stream=True):
        usage += [chunk.usage] if chunk.usage else []
        fingerprints.add(chunk.system_fingerprint)
        for choice in chunk.choices:
            mine = texts.setdefault(
                choice.index, {"text": "", "thought": "", "calls": [], "logprobs": [], "reason": ""}
            )
            mine["text"] += choice.delta.content or ""
            mine["thought"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(mine["calls"])
                    mine["calls"].append([call.function.name, ""])
                mine["calls"][call.index][1] += call.function.arguments
            if choice.logprobs:
                mine["logprobs"] += [entry.model_dump() for entry in choice.logprobs.content]
            mine["reason"] += choice.finish_reason or ""
    said = [
        Said(
            mine["text"],
            mine["reason"],
            [(name, arguments) for name, arguments in mine["calls"]],
            mine["thought"],
            mine["logprobs"] if asked.get("logprobs") else None,
        )
        for _, mine in sorted(texts.items())
    ]
    [used], [fingerprint] = usage, fingerprints
    return Got(said, (used.prompt_tokens, used.completion_tokens), fingerprint)


def text(client: openai.OpenAI, **asked: Any) -> Got:
    whole = client.completions.create(**asked)
    said = [
        Said(
            choice.text,
            choice.finish_reason,
            logprobs=choice.logprobs.model_dump() if choice.logprobs else None,
        )
        for choice in whole.choices
    ]
    return Got(said, (whole.usage.prompt_tokens, whole.usage.completion_tokens), whole.system_fingerprint)


def streamed_text(client: openai.OpenAI, **asked: Any) -> Got:
    texts: dict[int, list[Any]] = {}
    usage, fingerprints = [], set()
    for chunk in client.completions.create(**asked, stream=True):
        usage += [chunk.usage] if chunk.usage else []
        fingerprints.add(chunk.system_fingerprint)
        for choice in chunk.choices:
            mine = texts.setdefault(choice.index, ["", "", None])
            mine[0] += choice.text
            mine[1] += choice.finish_reason or ""
            if choice.logprobs:
                told = choice.logprobs.model_dump()
                mine[2] = {name: (mine[2] or {}).get(name, []) + told[name] for name in told}
    said = [Said(mine[0], mine[1], logprobs=mine[2]) for _, mine in sorted(texts.items())]
    [used], [fingerprint] = usage, fingerprints
    return Got(said, (used.prompt_tokens, used.completion_tokens), fingerprint)


Check = Callable[[Got], bool]
USER = [{"role": "user", "content": "hello"}]


def asks_of_chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    extra = {"messages": [{"role": "user", "content": content}], "model": "fake", "seed": 7}
    return extra | fields


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("fake"), {"tokens": 3, "calls": CALLS}) as server:
        server.wait_state("ready")
        yield server


def sdk(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def calls_are_whole(got: Got, count: int) -> bool:
    return got.only.calls == [tuple(call) for call in CALLS[:count]] and got.only.reason == "tool_calls"


BOTH = {"tools": [WEATHER, NOW]}
FAKE_CHAT: dict[str, tuple[dict[str, Any], Check]] = {
    "plain": ({}, lambda got: len(got.only.text.split()) == 3 and got.only.reason == "stop"),
    "tools": (BOTH, lambda got: calls_are_whole(got, 2)),
    "one tool offered": ({"tools": [WEATHER]}, lambda got: calls_are_whole(got, 1)),
    "tool_choice none": (BOTH | {"tool_choice": "none"}, lambda got: not got.only.calls),
    "tool_choice named": (
        BOTH | {"tool_choice": {"type": "function", "function": {"name": "now"}}},
        lambda got: got.only.calls == [("now", "{}")],
    ),
    "parallel_tool_calls": (BOTH | {"parallel_tool_calls": False}, lambda got: calls_are_whole(got, 1)),
    "a call cut off": (
        BOTH | {"max_completion_tokens": 8},
        lambda got: got.only.reason == "length" and ARGUMENTS.startswith(got.only.calls[0][1]),
    ),
    "several answers with calls": (
        BOTH | {"n": 3},
        lambda got: [len(each.calls) for each in got.choices] == [2, 2, 2] and got.usage[0] == 2,
    ),
    "n": ({"n": 4}, lambda got: len({each.text for each in got.choices}) > 1 and got.usage == (2, 12)),
    "n at its limit": ({"n": 64}, lambda got: len(got.choices) == 64 and got.usage == (2, 192)),
    "logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda got: (
            "".join(entry["token"] for entry in got.only.logprobs) == got.only.text
            and all(len(entry["top_logprobs"]) == 2 for entry in got.only.logprobs)
        ),
    ),
    "fields that do nothing": (
        {"extra_body": {"reasoning": {"max_tokens": 5}}, "user": "me", "metadata": {"a": "b"}, "store": True},
        lambda got: got.usage == (2, 3),
    ),
}


@pytest.mark.parametrize("name", FAKE_CHAT)
def test_openai_sdk_chat_is_the_same_streamed_and_whole(fake: Served, name: str) -> None:
    fields, is_right = FAKE_CHAT[name]
    with sdk(fake) as client:
        asked = asks_of_chat(**fields)
        whole = chat(client, **asked)
        assert is_right(whole), whole
        assert streamed_chat(client, **asked) == whole


FAKE_TEXT: dict[str, tuple[dict[str, Any], Check]] = {
    "batch of prompts": (
        {"prompt": ["one two", [1, 2, 3]], "n": 2},
        lambda got: len({each.text for each in got.choices}) == 4 and got.usage == (5, 12),
    ),
    "echo": ({"prompt": "one ", "echo": True}, lambda got: got.only.text.startswith("one ")),
    "echo of several": (
        {"prompt": ["one ", "two "], "echo": True},
        lambda got: [each.text[:4] for each in got.choices] == ["one ", "two "],
    ),
    "logprobs": (
        {"prompt": "x", "logprobs": 1},
        lambda got: (
            "".join(got.only.logprobs["tokens"]) == got.only.text
            and [got.only.text[at] for at in got.only.logprobs["text_offset"]]
            == [token[0] for token in got.only.logprobs["tokens"]]
        ),
    ),
}


@pytest.mark.parametrize("name", FAKE_TEXT)
def test_openai_sdk_text_is_the_same_streamed_and_whole(fake: Served, name: str) -> None:
    fields, is_right = FAKE_TEXT[name]
    with sdk(fake) as client:
        asked = {"model": "fake", "seed": 7} | fields
        whole = text(client, **asked)
        assert is_right(whole), whole
        assert streamed_text(client, **asked) == whole


def test_openai_sdk_parses_streamed_calls_itself(fake: Served) -> None:
    """The SDK's own accumulator, which is strict about indexes and ids: bugs.md A8, A14."""
    with (
        sdk(fake) as client,
        client.chat.completions.stream(**asks_of_chat(tools=[WEATHER, NOW])) as stream,
    ):
        message = stream.get_final_completion().choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert calls == [tuple(call) for call in CALLS]
    assert len({call.id for call in message.tool_calls or ()}) == 2


def test_openai_sdk_functions_are_answered_in_their_own_form(fake: Served) -> None:
    with sdk(fake) as client:
        asked = asks_of_chat(functions=[WEATHER["function"]], function_call={"name": "get_weather"})
        choice = client.chat.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert choice.finish_reason == chunks[-1].finish_reason == "function_call"
    assert choice.message.function_call is not None
    pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert (
        "".join(piece.arguments or "" for piece in pieces)
        == choice.message.function_call.arguments
        == ARGUMENTS
    )
    assert [piece.name for piece in pieces if piece.name] == ["get_weather"]


def test_openai_calls_go_on_where_they_were_when_the_worker_dies(tmp_path: Path) -> None:
    script = {"tokens": 2, "calls": CALLS, "crash_at": 6}
    with served(tmp_path, script) as server, sdk(server) as client:
        server.wait_state("ready")
        got = streamed_chat(client, **asks_of_chat(tools=[WEATHER, NOW]))
    assert calls_are_whole(got, 2)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "'g'",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]", "already"),
        ({"n": 65}, "n", "64"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x'"),
    ],
)
def test_openai_sdk_gets_a_typed_400_for_what_cannot_be(
    fake: Served, fields: Any, param: str, says: str
) -> None:
    with sdk(fake) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(**asks_of_chat(**fields), stream=stream)
            assert (caught.value.param or "").startswith(param)
            assert says in caught.value.message


def test_openai_unknown_fields_are_refused_by_a_strict_server(tmp_path: Path) -> None:
    with (
        served(tmp_path, {"reasoning": 1}, strict="true", reasoning_field="both") as server,
        sdk(server) as client,
    ):
        with pytest.raises(openai.BadRequestError, match="did you mean temperature"):
            client.chat.completions.create(**asks_of_chat(), extra_body={"temperatur": 1})
        message = client.chat.completions.create(**asks_of_chat(user="me")).choices[0].message
        assert message.reasoning == message.reasoning_content != ""  # type: ignore[attr-defined]


# ---------------------------------------------------------------- a real worker


def is_json(said: str, check: Callable[[Any], bool]) -> bool:
    return check(json.loads(said))


SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
REAL_CHAT: dict[str, tuple[dict[str, Any], Check]] = {
    "n, each with its own draws": (
        {"n": 3, "temperature": 1.5, "max_tokens": 12},
        lambda got: len({each.text for each in got.choices}) == 3,
    ),
    "n at temperature 0": (
        {"n": 2, "temperature": 0, "max_tokens": 8},
        lambda got: got.choices[0].text == got.choices[1].text,
    ),
    "logprobs of greedy text": (
        {"logprobs": True, "top_logprobs": 3, "temperature": 0, "max_tokens": 8},
        lambda got: all(
            entry["logprob"] == entry["top_logprobs"][0]["logprob"] and entry["bytes"] is not None
            for entry in got.only.logprobs
        ),
    ),
    "logit_bias": (
        {"logit_bias": {"7": 100}, "logprobs": True, "max_tokens": 4, "temperature": 0},
        lambda got: len({entry["token"] for entry in got.only.logprobs}) == 1,
    ),
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": True},
            },
            "max_tokens": 200,
            "temperature": 1,
        },
        lambda got: is_json(got.only.text, lambda value: isinstance(value["on"], bool)),
    ),
    "guided_choice": (
        {"extra_body": {"guided_choice": ["yes", "no"]}, "temperature": 1},
        lambda got: got.only.text in ("yes", "no"),
    ),
    "guided_regex": (
        {"extra_body": {"guided_regex": "[ab]{3}"}, "temperature": 1},
        lambda got: len(got.only.text) == 3 and set(got.only.text) <= {"a", "b"},
    ),
    "penalties": (
        {
            "presence_penalty": 1,
            "frequency_penalty": 1,
            "extra_body": {
                "repetition_penalty": 1.2,
                "repetition_context_size": 9,
                "min_p": 0.01,
                "xtc_probability": 0.5,
            },
            "max_tokens": 8,
        },
        lambda got: got.usage[1] <= 8,
    ),
    "hlg": ({"extra_body": {"hlg": {"width": 2}}, "max_tokens": 8}, lambda got: got.usage[1] <= 8),
    "curve": (
        {"extra_body": {"curve": {"points": [[0, 0], [60, 30], [100, 100]]}}, "max_tokens": 8},
        lambda got: got.usage[1] <= 8,
    ),
}


@pytest.mark.parametrize("name", REAL_CHAT)
def test_openai_sdk_chat_of_a_real_worker_does_what_is_asked(tiny: Served, name: str) -> None:
    fields, is_right = REAL_CHAT[name]
    with sdk(tiny) as client:
        asked = asks_of_chat("the cat", **fields) | {"model": "tiny"}
        whole = chat(client, **asked)
        assert is_right(whole), whole
        streamed = streamed_chat(client, **asked)
        assert [each._replace(logprobs=None) for each in streamed.choices] == [
            each._replace(logprobs=None) for each in whole.choices
        ]
        for mine, other in zip(streamed.choices, whole.choices, strict=True):
            assert are_close(mine.logprobs, other.logprobs)


def are_close(mine: Any, other: Any) -> bool:
    """The same tokens with the same log-probabilities, up to what another batch changes in the last digits."""
    if isinstance(mine, float):
        return math.isclose(mine, other, abs_tol=1e-3)
    if isinstance(mine, list):
        return len(mine) == len(other) and all(map(are_close, mine, other))
    if isinstance(mine, dict):
        return mine.keys() == other.keys() and all(are_close(mine[key], other[key]) for key in mine)
    return bool(mine == other)


def test_openai_stops_leave_nothing_of_themselves_in_a_stream(tiny: Served) -> None:
    """bugs.md A18: a stop that begins and ends inside of words."""
    with sdk(tiny) as client:
        asked = asks_of_chat("the cat", model="tiny", temperature=0, max_tokens=40)
        said = chat(client, **asked).only.text
        assert len(said) > 20
        stop = said[7:16]
        stopped = chat(client, **asked, stop=[stop]).only
        assert (stopped.text, stopped.reason) == (said[: said.index(stop)], "stop")
        assert streamed_chat(client, **asked, stop=[stop]).only == stopped


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a{1,1000}){1,1000}" * 20},
        {"guided_regex": "(((("},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
        {"guided_json": {"type": "string", "pattern": "(x+x+)+y"}},
        {"guided_grammar": "start: start start"},
        {"logit_bias": {"999999999": 1}},
    ],
)
def test_openai_hostile_forms_are_a_typed_400_or_an_answer(tiny: Served, fields: Any) -> None:
    asked = {"messages": USER, "max_tokens": 4} | fields
    for stream in (False, True):
        answer = tiny.http.post("/v1/chat/completions", json=asked | {"stream": stream})
        assert answer.status_code in (200, 400)
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "invalid_request"
    assert tiny.http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1}).status_code == 200
