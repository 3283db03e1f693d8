"""OpenAI's streams: whatever the batches, valid frames whose deltas joined are the whole answer."""

import itertools
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.protocols.base import Answer, DecodedRequest, Manners, Meta, Protocol
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import completions as openai_completions
from parent.protocols.runs import runs
from shared import wire

PROTOCOLS = (openai_chat.PROTOCOL, openai_completions.PROTOCOL)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
alternatives = st.builds(wire.Alternative, st.integers(0, 9), st.floats(-9, 0), st.binary(max_size=4))
logprobs = st.lists(
    st.builds(
        wire.Logprob,
        st.integers(0, 9),
        st.floats(-9, 0) | st.just(float("-inf")),
        st.binary(max_size=4),
        st.lists(alternatives, max_size=2),
    ),
    max_size=2,
)
plain_events = st.one_of(
    st.builds(wire.Text, texts, st.just([1]), logprobs),
    st.builds(wire.Reasoning, texts, st.just([1])),
    st.just(wire.Prefill(1, 2)),
    st.just(wire.Started(3, 1, 5, "the prompt")),
)


@st.composite
def answers(draw: st.DrawFn) -> list[wire.Event]:
    """The events of one choice without its end; calls follow each other, each in pieces."""
    events: list[wire.Event] = []
    calls = 0
    for _ in range(draw(st.integers(0, 6))):
        if draw(st.integers(0, 2)):
            events.append(draw(plain_events))
            continue
        events.append(wire.ToolCall(calls, draw(texts), f"call_{calls}", f"f{calls}", [1]))
        for piece in draw(st.lists(texts, max_size=3)):
            events.append(wire.ToolCall(calls, piece, ids=[1]))
            if draw(st.booleans()):
                events.append(draw(plain_events))
        calls += 1
    return events


class Case(NamedTuple):
    """What the worker says of each choice, the order in which it leaves, and how it was asked for."""

    choices: list[list[wire.Event]]
    order: list[tuple[int, int]]  # (choice, events of it)
    asked: DecodedRequest
    manners: Manners


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n, prompts = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    choices = [draw(answers()) for _ in range(n * prompts)]
    asked = DecodedRequest(
        prompts=[wire.TextPrompt("the prompt")] * prompts,
        n=n,
        include_usage=draw(st.booleans()),
        usage_with_every_chunk=draw(st.booleans()),
        logprobs=draw(st.none() | st.just(2)),
        echo=draw(st.booleans()),
    )
    order = draw(st.lists(st.tuples(st.integers(0, len(choices) - 1), st.integers(1, 4)), max_size=30))
    names = draw(
        st.sampled_from([("reasoning_content",), ("reasoning",), ("reasoning_content", "reasoning")])
    )
    return Case(choices, order, asked, Manners(reasoning=names))


def finish_of(choice: int) -> wire.Finish:
    return wire.Finish("length" if choice else "stop", wire.Usage(3, 4 + choice, 1, 2), lane="solo")


def stream_and_whole(protocol: Protocol, case: Case) -> tuple[bytes, dict[str, Any]]:
    meta = Meta("1" * 32, 1, 'name "￼"', case.asked, case.manners, "fp_1")
    encoder, body = protocol.stream(meta), b""
    rest = [list(events) for events in case.choices]
    for choice, size in [*case.order, *((choice, 99) for choice in range(len(rest)))]:
        batch, rest[choice] = rest[choice][:size], rest[choice][size:]
        body += encoder.feed(batch, choice) if batch else b""
    for choice in reversed(range(len(rest))):
        body += encoder.finish(finish_of(choice), choice)
    gathered = []
    for choice, events in enumerate(case.choices):
        answer = Answer()
        answer.add([wire.Started(3, 1, 5, "the prompt"), *events, finish_of(choice)])
        gathered.append(answer)
    return body, json.loads(protocol.answer(meta, gathered))


def frames_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON of all frames; every rule of the framing is checked on the way."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    found = []
    for frame in frames:
        assert "\n" not in frame
        if not frame.startswith(": "):
            assert frame.startswith("data: ")
            found.append(json.loads(frame[6:]))
    return found


class Joined:
    """One choice, put together from its deltas as a client does it."""

    def __init__(self) -> None:
        self.said = {"content": "", "reasoning_content": "", "reasoning": "", "text": ""}
        self.calls: list[dict[str, str]] = []
        self.logprobs: list[Any] = []
        self.reasons: list[str] = []
        self.roles: list[str] = []

    def add(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta", {"text": choice.get("text")})
        for name in self.said:
            self.said[name] += delta.get(name) or ""
        self.roles += [delta["role"]] if "role" in delta else []
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(self.calls)
                assert call["type"] == "function"
                self.calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            assert set(call) <= {"index", "id", "type", "function"}
            self.calls[call["index"]]["arguments"] += call["function"]["arguments"]
        told = choice.get("logprobs")
        if told:
            self.logprobs += told["content"] if "content" in told else zip(*told.values(), strict=True)
        self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []


def without_repeated_starts(case: Case) -> Case:
    """An echo comes with `Started`, which is always first, and only once."""
    choices = [
        [
            wire.Started(3, 1, 5, "the prompt"),
            *(each for each in events if not isinstance(each, wire.Started)),
        ]
        for events in case.choices
    ]
    return case._replace(choices=choices)


@given(cases())
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
def test_openai_deltas_joined_are_the_whole_answer_however_events_are_batched(
    protocol: Protocol, case: Case
) -> None:
    if case.asked.echo:
        case = without_repeated_starts(case)
    body, whole = stream_and_whole(protocol, case)
    frames = frames_of(body)
    joined = [Joined() for _ in case.choices]
    for frame in frames:
        assert (frame["id"], frame["model"]) == (whole["id"], 'name "￼"')
        assert (frame["created"], frame["system_fingerprint"]) == (1, "fp_1")
        for choice in frame["choices"]:
            joined[choice["index"]].add(choice)
    assert frames[-1]["usage"] == whole["usage"]
    with_usage = [frame for frame in frames if "usage" in frame]
    assert len(with_usage) == (len(frames) if case.asked.usage_with_every_chunk else 1)
    assert (frames[-1]["choices"] == []) is case.asked.include_usage
    for index, (mine, choice) in enumerate(zip(joined, whole["choices"], strict=True)):
        assert choice["index"] == index
        assert mine.reasons == [choice["finish_reason"]]
        told = choice["logprobs"]
        if protocol.name == "openai_completions":
            assert mine.said["text"] == choice["text"]
            assert mine.logprobs == (list(zip(*told.values(), strict=True)) if told else [])
            continue
        assert mine.roles == ["assistant"]
        message = choice["message"]
        for name in ("content", "reasoning_content", "reasoning"):
            assert mine.said[name] == (message.get(name) or "")
        assert mine.logprobs == (told["content"] if told else [])
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())]
        assert mine.calls == calls
        assert (message["content"] is None) is (bool(calls) and not mine.said["content"])


@given(cases())
def test_openai_usage_counts_each_prompt_once_and_every_answer(case: Case) -> None:
    _, whole = stream_and_whole(openai_chat.PROTOCOL, case)
    completion = sum(4 + choice for choice in range(len(case.choices)))
    usage = whole["usage"]
    assert usage["prompt_tokens"] == 3 * len(case.asked.prompts)
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(case.asked.prompts)}
    assert usage["completion_tokens"] == completion
    assert usage["total_tokens"] == usage["prompt_tokens"] + completion
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len(case.choices)}
    assert usage["lane"] == "solo"


@given(answers())
def test_openai_runs_of_a_batch_keep_every_character_in_its_place(events: list[wire.Event]) -> None:
    def spelled(of: list[Any]) -> list[tuple[str, str]]:
        found = []
        for each in of:
            if isinstance(each, wire.ToolCall):
                name = f"call {each.index} {each.name}" if each.name else f"call {each.index}"
                found += [(name, "")] if each.name else []
                found += [(f"call {each.index}", character) for character in each.arguments]
            elif isinstance(each, wire.Text | wire.Reasoning):
                found += [(type(each).__name__, character) for character in each.text]
        return found

    joined = runs(events)
    assert spelled(joined) == spelled(events)
    kinds = [(type(run), run.index if isinstance(run, wire.ToolCall) else 0) for run in joined]
    assert all(kind != following for kind, following in itertools.pairwise(kinds))


def test_openai_function_call_is_the_old_form_of_one_call() -> None:
    asked = DecodedRequest(prompts=[wire.ChatPrompt([])], as_function_call=True)
    events: list[wire.Event] = [
        wire.Started(3),
        wire.ToolCall(0, "", "c", "f", [1]),
        wire.ToolCall(0, "{}", ids=[2]),
    ]
    finish = wire.Finish("tool_calls", wire.Usage(3, 2))
    meta = Meta("1", 1, "m", asked)
    encoder = openai_chat.PROTOCOL.stream(meta)
    body = b"".join(encoder.feed([event]) for event in events) + encoder.finish(finish)
    deltas = [frame["choices"][0]["delta"] for frame in frames_of(body)]
    assert [delta.get("function_call") for delta in deltas] == [
        None, {"name": "f", "arguments": ""}, {"arguments": "{}"}, None
    ]  # fmt: skip
    whole = Answer()
    whole.add([*events, finish])
    choice = json.loads(openai_chat.PROTOCOL.answer(meta, [whole]))["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"] == {
        "role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}
    }  # fmt: skip
