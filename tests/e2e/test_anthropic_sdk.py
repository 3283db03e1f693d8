"""Anthropic's own SDK asks for each feature, streamed and not: both give the same, and what was asked for.

Against the fake worker, which calls tools, thinks and fails as it is told, and against a real one on a tiny model,
which enforces what it is asked to.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.process.harness import Served, served

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"name": "get_weather", "description": "now", "input_schema": PARAMETERS}
NOW = {"type": "custom", "name": "now", "input_schema": {"type": "object"}}
ARGUMENTS = '{"place": "Zürich }{ \\"東京\\"", "n": {"a": [1, {}]}}'
CALLS = [["get_weather", ARGUMENTS], ["now", "{}"]]
BOTH = {"tools": [WEATHER, NOW]}

Said = dict[str, Any]
"""A message as plain JSON, without its id."""


def asks(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    extra = {"messages": [{"role": "user", "content": content}], "model": "fake", "max_tokens": 999}
    return extra | fields | {"extra_body": {"seed": 7} | fields.get("extra_body", {})}


def whole(client: anthropic.Anthropic, **asked: Any) -> Said:
    return plain(client.messages.create(**asked))


def streamed(client: anthropic.Anthropic, **asked: Any) -> Said:
    """Put together by the SDK."""
    with client.messages.stream(**asked) as stream:
        return plain(stream.get_final_message())


def plain(message: Any) -> Said:
    found: Said = json.loads(message.model_dump_json(exclude_none=True, warnings=False))
    assert found.pop("id").startswith("msg_")
    for block in found["content"]:
        block.pop("partial_json", None)  # of a call that was cut off; a stream has it in its deltas
    return found


def text(said: Said) -> str:
    return "".join(block["text"] for block in said["content"] if block["type"] == "text")


def calls(said: Said) -> list[tuple[str, Any]]:
    return [(block["name"], block["input"]) for block in said["content"] if block["type"] == "tool_use"]


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = {"keepalive_s": 0.05, "max_body_bytes": 100_000}
    with served(tmp_path_factory.mktemp("fake"), {"tokens": 3, "calls": CALLS}, **settings) as server:
        server.wait_state("ready")
        yield server


def sdk(server: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


def calls_are_whole(said: Said, count: int) -> bool:
    wanted = [(name, json.loads(arguments)) for name, arguments in CALLS[:count]]
    return calls(said) == wanted and said["stop_reason"] == "tool_use"


HISTORY = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "now", "input": {}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5", "is_error": True}]},
]  # fmt: skip

FAKE: dict[str, tuple[dict[str, Any], Callable[[Said], bool]]] = {
    "plain": ({}, lambda said: len(text(said).split()) == 3 and said["stop_reason"] == "end_turn"),
    "usage": ({}, lambda said: (said["usage"]["input_tokens"], said["usage"]["output_tokens"]) == (2, 3)),
    "the name that was sent": ({}, lambda said: said["model"] == "fake"),
    "system": ({"system": "be brief now"}, lambda said: said["usage"]["input_tokens"] == 6),
    "tools": (BOTH, lambda said: calls_are_whole(said, 2) and len(text(said).split()) == 3),
    "one tool offered": ({"tools": [WEATHER]}, lambda said: calls_are_whole(said, 1)),
    "tool_choice none": (BOTH | {"tool_choice": {"type": "none"}}, lambda said: not calls(said)),
    "tool_choice any": (BOTH | {"tool_choice": {"type": "any"}}, lambda said: calls_are_whole(said, 2)),
    "tool_choice tool": (
        BOTH | {"tool_choice": {"type": "tool", "name": "now"}},
        lambda said: calls(said) == [("now", {})],
    ),
    "disable_parallel_tool_use": (
        BOTH | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        lambda said: calls_are_whole(said, 1),
    ),
    "a call cut off": (
        BOTH | {"max_tokens": 11},
        lambda said: said["stop_reason"] == "max_tokens" and calls(said) == [("get_weather", {})],
    ),
    "max_tokens": ({"max_tokens": 2}, lambda said: said["stop_reason"] == "max_tokens"),
    "thinking": (
        asks('fake:{"reasoning":2}', thinking={"type": "enabled", "budget_tokens": 1024}),
        lambda said: [block["type"] for block in said["content"]] == ["thinking", "text"],
    ),
    "nothing": (
        asks('fake:{"tokens":0}'),
        lambda said: said["content"] == [{"type": "text", "text": ""}],
    ),
    "a call and its result in history": (
        {"messages": HISTORY, "tools": [WEATHER]},
        lambda said: calls_are_whole(said, 1),
    ),
    "fields that do nothing": (
        {
            "metadata": {"user_id": "me"},
            "service_tier": "auto",
            "extra_headers": {"anthropic-beta": "context-management-2025-06-27"},
            "extra_body": {"context_management": {"edits": []}},
        },
        lambda said: said["usage"]["output_tokens"] == 3,
    ),
}


@pytest.mark.parametrize("name", FAKE)
def test_anthropic_sdk_gets_the_same_streamed_and_whole(fake: Served, name: str) -> None:
    fields, is_right = FAKE[name]
    with sdk(fake) as client:
        asked = asks() | fields
        asked["extra_body"] = {"seed": 7} | asked["extra_body"]
        answer = whole(client, **asked)
        assert is_right(answer), answer
        assert streamed(client, **asked) == answer


def test_anthropic_sdk_counts_the_tokens_that_a_request_has(fake: Served) -> None:
    with sdk(fake) as client:
        asked = {"messages": [{"role": "user", "content": "one two three"}], "model": "fake", "system": "s"}
        counted = client.messages.count_tokens(**asked).input_tokens
        assert counted == client.messages.create(**asked, max_tokens=1).usage.input_tokens == 6


def test_anthropic_a_waiting_stream_is_pinged(fake: Served) -> None:
    body = {
        "messages": [{"role": "user", "content": 'fake:{"queue_ms": 400}'}],
        "max_tokens": 9,
        "stream": True,
    }
    lines = fake.http.post("/v1/messages", json=body).text.splitlines()
    first = lines.index("event: message_start")
    assert lines[:first].count('data: {"type":"ping"}') >= 1
    assert any(line.startswith(": ") for line in lines[:first])


def test_anthropic_a_stream_goes_on_when_the_worker_dies(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 2, "calls": CALLS, "crash_at": 6}) as server, sdk(server) as client:
        server.wait_state("ready")
        assert calls_are_whole(streamed(client, **asks(tools=[WEATHER])), 1)


# ---------------------------------------------------------------- failures

TOO_LONG = "prompt is too long: "
FAILURES: list[tuple[dict[str, Any], type[anthropic.APIStatusError], str, str]] = [
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     anthropic.BadRequestError, "invalid_request_error", "server tools are not run here"),
    ({"stop_sequences": [""]}, anthropic.BadRequestError, "invalid_request_error", "stop_sequences"),
    ({"model": "claude-nothing"}, anthropic.NotFoundError, "not_found_error", "claude-nothing"),
    (asks("x" * 200_000), anthropic.ContentTooLargeError, "request_too_large", "100000"),
    (asks('fake:{"refuse":"queue_full"}'), anthropic.RateLimitError, "rate_limit_error", "as told"),
    (asks('fake:{"refuse":"loading"}'), anthropic.OverloadedError, "overloaded_error", "as told"),
    (asks('fake:{"refuse":"engine_unavailable"}'), anthropic.OverloadedError, "overloaded_error", "as told"),
    (asks('fake:{"refuse":"engine_fault"}'), anthropic.InternalServerError, "api_error", "as told"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "kind", "name", "says"), FAILURES)
def test_anthropic_sdk_raises_the_right_class(
    fake: Served, fields: dict[str, Any], kind: type[anthropic.APIStatusError], name: str, says: str
) -> None:
    with sdk(fake) as client:
        asked = asks() | fields
        for ask in (whole, streamed):
            with pytest.raises(kind) as caught:
                ask(client, **asked)
            error = caught.value
            assert type(error) is kind
            assert (error.type, error.body["type"]) == (name, "error")
            assert says in error.body["error"]["message"]
            assert error.request_id
            assert error.body["request_id"] == error.request_id
            retries = error.status_code in (429, 529)
            assert ("retry-after" in error.response.headers) is retries


def test_anthropic_sdk_hears_of_a_failure_in_the_middle_of_a_stream(fake: Served) -> None:
    with sdk(fake) as client, pytest.raises(anthropic.APIStatusError) as caught:
        streamed(client, **asks('fake:{"fail_after":2}'))
    assert caught.value.type == "api_error"
    assert caught.value.body["request_id"] == caught.value.response.headers["request-id"]


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "kind"),
    [
        ("GET", "/v1/messages", {}, 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", {}, 404, "not_found_error"),
        ("POST", "/v1/messages?beta=true", {"origin": "http://evil.example"}, 403, "permission_error"),
        ("POST", "/v1/messages", {"host": "evil.example"}, 403, "permission_error"),
        ("POST", "/v1/messages", {"x-request-id": "mine"}, 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", {}, 400, "invalid_request_error"),
    ],
)
def test_anthropic_failures_of_the_front_door_have_its_shape(
    fake: Served, method: str, path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    answer = fake.http.request(method, path, headers=headers, content=b"{")
    assert answer.status_code == status
    body = answer.json()
    assert set(body) == {"type", "error", "request_id"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    given = answer.headers["request-id"]
    assert body["request_id"] == given == answer.headers["x-request-id"]
    assert given == headers.get("x-request-id", given)


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/chat/completions", "/nothing"])
def test_anthropic_shape_is_not_that_of_other_paths(fake: Served, path: str) -> None:
    answer = fake.http.post(path, content=b"{")
    assert set(answer.json()) == {"error"}
    assert "request-id" not in answer.headers


# ---------------------------------------------------------------- a real worker


def greedy(content: str = "the cat", **fields: Any) -> dict[str, Any]:
    extra = {"extra_body": {"temperature": 0, "seed": 7}}  # the SDK has no argument for it any more
    return asks(content) | {"model": "tiny", "max_tokens": 40} | extra | fields


def test_anthropic_stop_sequences_say_which_one_fired(tiny: Served) -> None:
    with sdk(tiny) as client:
        said = text(whole(client, **greedy()))
        stop = said[7:16]
        stopped = whole(client, **greedy(stop_sequences=["not there", stop]))
        assert (text(stopped), stopped["stop_reason"]) == (said[: said.index(stop)], "stop_sequence")
        assert stopped["stop_sequence"] == stop
        assert text(streamed(client, **greedy(stop_sequences=[stop]))) == text(stopped)


def test_anthropic_an_answer_begins_with_the_last_turn_and_kept_prompts_are_told_apart(tiny: Served) -> None:
    with sdk(tiny) as client:
        said = text(whole(client, **greedy(max_tokens=20)))
        begun = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": said[:8]}]
        assert text(whole(client, **greedy(messages=begun, max_tokens=10))) in said[8:] + " "
        count = client.messages.count_tokens(messages=begun, model="tiny").input_tokens
        usage = client.messages.create(messages=begun, model="tiny", max_tokens=1).usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
        assert usage.input_tokens > 0


def test_anthropic_the_form_of_an_answer_is_enforced(tiny: Served) -> None:
    form = {"format": {"type": "json_schema", "schema": {"enum": ["left", "right"]}}}
    with sdk(tiny) as client:
        for ask in (whole, streamed):
            answer = ask(client, **greedy(output_config=form, max_tokens=60))
            assert json.loads(text(answer)) in ("left", "right")


def test_anthropic_a_prompt_too_long_is_told_in_words_that_clients_look_for(tiny: Served) -> None:
    context = tiny.engine()["facts"]["context"]
    with sdk(tiny) as client:
        for ask in (whole, streamed):
            with pytest.raises(anthropic.BadRequestError) as caught:
                ask(client, **greedy("the cat " * context))
            assert caught.value.body["error"]["message"].startswith(TOO_LONG)
            assert f"> {context - 1} maximum" in caught.value.body["error"]["message"]
        ended = whole(client, **greedy(max_tokens=10 * context))
        assert ended["stop_reason"] in ("model_context_window_exceeded", "end_turn")


def test_anthropic_only_calls_in_history_are_rendered(tiny: Served) -> None:
    """bugs.md A1: a turn of the assistant that holds nothing but a call, and its result."""
    with sdk(tiny) as client:
        asked = greedy(messages=HISTORY, max_tokens=4)
        assert whole(client, **asked)["usage"]["output_tokens"] > 0
        plain_count = client.messages.count_tokens(model="tiny", messages=HISTORY[:1]).input_tokens
        full = client.messages.count_tokens(model="tiny", messages=HISTORY).input_tokens
        assert full > plain_count + 10
