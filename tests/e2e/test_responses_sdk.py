"""OpenAI's own SDK over `client.responses`: each feature whole and streamed, against the fake worker and a real one."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.e2e.test_openai_sdk import ARGUMENTS, CALLS, PARAMETERS, sdk
from tests.process.harness import Served, served, until

WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
PATCHED = '{"input": "*** Begin Patch\\n+\\"東京\\" \\ud83d\\ude00"}'


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    script = {"tokens": 3, "calls": [*CALLS, ["apply_patch", PATCHED]]}
    with served(tmp_path_factory.mktemp("fake"), script) as server:
        server.wait_state("ready")
        yield server


def streamed(client: openai.OpenAI, **asked: Any) -> Response:
    """The final response, once the SDK has put the stream together and every event was checked."""
    seen, deltas = [], ""
    for event in client.responses.create(**asked, stream=True):
        seen.append(event)
        deltas += event.delta if event.type == "response.output_text.delta" else ""
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    last = seen[-1]
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.output_text == deltas
    done = [event.item for event in seen if event.type == "response.output_item.done"]
    assert done == last.response.output
    return last.response


def comparable(response: Response) -> dict[str, Any]:
    """Without what is another in each response."""
    told = json.loads(response.model_dump_json())
    for item in told["output"]:
        assert item.pop("id")
        item.pop("call_id", None)
    return {name: value for name, value in told.items() if name not in ("id", "created_at", "completed_at")}


Check = Callable[[Response], bool]
BOTH = {"tools": [WEATHER, NOW]}


def calls_of(response: Response) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


FEATURES: dict[str, tuple[dict[str, Any], Check]] = {
    "plain": ({}, lambda got: len(got.output_text.split()) == 3 and got.status == "completed"),
    "a list of messages": (
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]},
        lambda got: got.usage.input_tokens == 2,
    ),
    "instructions": ({"instructions": "Be brief."}, lambda got: got.usage.input_tokens == 5),
    "tools": (BOTH, lambda got: calls_of(got) == [tuple(call) for call in CALLS]),
    "tool_choice none": (BOTH | {"tool_choice": "none"}, lambda got: not calls_of(got)),
    "tool_choice named": (
        BOTH | {"tool_choice": {"type": "function", "name": "now"}},
        lambda got: calls_of(got) == [("now", "{}")],
    ),
    "parallel_tool_calls": (
        BOTH | {"parallel_tool_calls": False},
        lambda got: calls_of(got) == [("get_weather", ARGUMENTS)],
    ),
    "a custom tool": (
        {"tools": [PATCH, {"type": "web_search"}]},
        lambda got: (
            [(item.type, item.input) for item in got.output[1:]]
            == [("custom_tool_call", json.loads(PATCHED)["input"])]
        ),
    ),
    "cut off": (
        BOTH | {"max_output_tokens": 8},
        lambda got: (
            (got.status, got.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            and ARGUMENTS.startswith(calls_of(got)[0][1])
        ),
    ),
    "reasoning": (
        {"input": 'x fake:{"reasoning": 2}'},
        lambda got: (
            len(got.output[0].content[0].text.split()) == 2
            and got.usage.output_tokens_details.reasoning_tokens == 2
        ),
    ),
    "a summary": (
        {"input": 'x fake:{"reasoning": 2}', "reasoning": {"effort": "low", "summary": "auto"}},
        lambda got: len(got.output[0].summary[0].text.split()) == 2 and not got.output[0].content,
    ),
    "logprobs": (
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        lambda got: (
            "".join(entry.token for entry in got.output[0].content[0].logprobs) == got.output_text
            and all(len(entry.top_logprobs) == 2 for entry in got.output[0].content[0].logprobs)
        ),
    ),
    "what is only repeated": (
        {"metadata": {"a": "b"}, "user": "me", "prompt_cache_key": "k", "text": {"verbosity": "low"}},
        lambda got: (got.metadata, got.user, got.text.verbosity) == ({"a": "b"}, "me", "low"),
    ),
    "not stored": ({"store": False}, lambda got: got.model_extra["store"] is False),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_responses_sdk_gets_the_same_streamed_and_whole(fake: Served, name: str) -> None:
    fields, is_right = FEATURES[name]
    with sdk(fake) as client:
        asked = {"model": "fake", "input": "hello", "extra_body": {"seed": 7}} | fields
        whole = client.responses.create(**asked)
        assert is_right(whole), whole
        assert whole.model == "fake"
        assert comparable(streamed(client, **asked)) == comparable(whole)
        Response.model_validate(json.loads(whole.model_dump_json(by_alias=True)))


def test_responses_sdk_streams_with_its_helper_and_parses(fake: Served) -> None:
    with sdk(fake) as client:
        asked: dict[str, Any] = {"model": "fake", "input": "hello", "tools": [WEATHER, PATCH]}
        with client.responses.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert final.output_text
        assert calls_of(final) == [("get_weather", ARGUMENTS)]


def test_responses_sdk_keeps_a_conversation(fake: Served) -> None:
    with sdk(fake) as client:
        first = client.responses.create(model="fake", input="one", tools=[WEATHER])  # type: ignore[list-item]
        call = first.output[-1]
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = client.responses.create(model="fake", input=[result], previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert client.responses.retrieve(second.id) == second
        listed = client.responses.input_items.list(second.id, order="asc", limit=2)
        kinds = [item.type for item in listed]
        assert kinds == ["message", "message", "function_call", "function_call_output"]
        newest = next(iter(client.responses.input_items.list(second.id)))
        assert newest.type == "function_call_output"
        assert newest.output == "sunny"
        third = client.responses.create(
            model="fake", input=[{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "x"}]
        )  # fmt: skip
        assert third.usage is not None
        assert third.usage.input_tokens == 1 + 3 + 2
        counted = client.responses.input_tokens.count(
            model="fake", input="a b", previous_response_id=first.id
        )
        assert counted.input_tokens == 2 + 1 + 3 + 3
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError, match=first.id):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError, match=first.id):
            client.responses.create(model="fake", input="x", previous_response_id=second.id)


def test_responses_sdk_runs_in_the_background_and_comes_back(fake: Served) -> None:
    with sdk(fake) as client:
        slow = 'x fake:{"ms_per_token": 20, "tokens": 20}'
        begun = client.responses.create(model="fake", input=slow, background=True)
        assert begun.status == "queued"
        seen = list(client.responses.retrieve(begun.id, stream=True, starting_after=2))
        assert [event.sequence_number for event in seen] == list(range(3, 3 + len(seen)))
        assert seen[-1].type == "response.completed"
        assert client.responses.retrieve(begun.id).status == "completed"
        with client.responses.stream(response_id=begun.id, starting_after=4) as stream:
            assert [event.sequence_number for event in stream] == [
                event.sequence_number for event in seen[2:]
            ]
        held = client.responses.create(model="fake", input='x fake:{"hold_after": 1}', background=True)
        until(lambda: client.responses.retrieve(held.id).output_text, "something is written")
        assert client.responses.cancel(held.id).status == "cancelled"
        assert client.responses.retrieve(held.id).status == "cancelled"


def test_responses_sdk_raises_its_own_errors(fake: Served) -> None:
    with sdk(fake) as client:
        with pytest.raises(openai.BadRequestError, match="conversation") as refused:
            client.responses.create(model="fake", input="x", conversation="conv_1")
        assert refused.value.param == "conversation"
        with pytest.raises(openai.NotFoundError, match="no model 'fakee'"):
            client.responses.create(model="fakee", input="x")
        *_, last = client.responses.create(model="fake", input='x fake:{"fail_after": 1}', stream=True)
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"


@pytest.mark.parametrize("options", [["yes", "no"], ["東京"]])
def test_responses_sdk_of_a_real_worker_gets_the_form_and_the_conversation(
    tiny: Served, options: list[str]
) -> None:
    with sdk(tiny) as client:
        form: Any = {"type": "json_schema", "name": "it", "schema": {"enum": options}}
        asked: dict[str, Any] = {
            "model": "tiny",
            "temperature": 0,
            "input": "hello",
            "text": {"format": form},
        }
        first = client.responses.create(**asked)
        assert json.loads(first.output_text) in options
        again = streamed(client, **asked)
        assert (again.output_text, again.status) == (first.output_text, "completed")
        following: dict[str, Any] = {"model": "tiny", "input": "and?", "previous_response_id": first.id}
        counted = client.responses.input_tokens.count(**following)
        second = client.responses.create(**following, max_output_tokens=4, temperature=0)
        assert first.usage is not None
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens > first.usage.input_tokens
        assert second.status == "incomplete"
