"""Responses: however events are batched, a stream that OpenAI's types accept, whose deltas make the whole answer."""

import json
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from parent.protocols.base import Answer, Meta
from parent.protocols.responses import decode as responses
from parent.protocols.responses.stream import ResponseStream
from shared import wire
from shared.errors import ErrorCode, Failure
from tests.parent.test_openai_streams import answers

accepted = TypeAdapter(ResponseStreamEvent).validate_python
FUNCTION = {"type": "function", "name": "f0", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "f1"}
bodies = st.fixed_dictionaries(
    {"input": st.just("hi"), "tools": st.just([FUNCTION, CUSTOM])},
    optional={
        "reasoning": st.sampled_from([{"summary": "auto"}, {"effort": "low"}]),
        "include": st.sampled_from([["message.output_text.logprobs"], ["reasoning.encrypted_content"]]),
        "instructions": st.text(max_size=3),
        "store": st.booleans(),
        "background": st.just(True),
    },
).filter(lambda body: not (body.get("background") and body.get("store") is False))
finishes = st.sampled_from(["stop", "length", "tool_calls", "cancelled"])


class Told(NamedTuple):
    """A stream taken apart."""

    frames: list[dict[str, Any]]
    comments: list[str]


def taken_apart(body: bytes) -> Told:
    """Every rule of the framing is checked on the way."""
    *blocks, rest = body.decode().split("\n\n")
    assert rest == ""
    frames = []
    comments = [block for block in blocks if block.startswith(": ")]
    for block in blocks:
        if not block.startswith(": "):
            name, data = block.split("\n")
            frame = json.loads(data.removeprefix("data: "))
            assert name == f"event: {frame['type']}"
            frames.append(frame)
    assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
    for frame in frames:
        accepted(frame, strict=False)
    return Told(frames, comments)


def meta_of(body: dict[str, Any]) -> Meta:
    return Meta("ab" * 16, 1700000000, "the model", responses.decode(json.dumps(body).encode()))


def streamed(meta: Meta, events: list[wire.Event], sizes: list[int], finish: wire.Finish) -> Told:
    encoder = ResponseStream(meta)
    body, rest = b"", list(events)
    if meta.asked.shown.background:  # type: ignore[attr-defined]
        body += encoder.queue()
    for size in [*sizes, len(events) + 1]:
        batch, rest = rest[:size], rest[size:]
        body += encoder.feed(batch) if batch else b""
    return taken_apart(body + encoder.finish(finish))


class Item:
    """One output item, put together from its events as a client does it."""

    def __init__(self, added: dict[str, Any]) -> None:
        assert added["status"] == "in_progress"
        self.added = added
        self.texts: dict[str, str] = {}
        self.done: dict[str, str] = {}
        self.parts: list[dict[str, Any]] = []
        self.logprobs: list[Any] = []
        self.item: dict[str, Any] | None = None

    def take(self, frame: dict[str, Any]) -> None:
        assert self.item is None, "an item that is done has no further events"
        what, _, step = frame["type"].removeprefix("response.").rpartition(".")
        if step == "delta":
            assert what not in self.done
            self.texts[what] = self.texts.get(what, "") + frame["delta"]
            self.logprobs += frame.get("logprobs", [])
        elif step == "added":
            assert not self.texts
            assert frame["part"]["text"] == ""
        elif "part" in frame:
            self.parts.append(frame["part"])
        else:
            [text] = [frame[key] for key in ("text", "arguments", "input") if key in frame]
            self.done[what] = text
            assert text == self.texts.get(what, "")
            assert frame.get("logprobs", []) == self.logprobs


def as_asked(events: list[wire.Event], body: dict[str, Any]) -> list[wire.Event]:
    """A worker tells log-probabilities only to who asks for them."""
    if responses.LOGPROBS in body.get("include", ()):
        return events
    return [
        msgspec.structs.replace(event, logprobs=[]) if isinstance(event, wire.Content) else event
        for event in events
    ]


@given(answers(), st.lists(st.integers(1, 4), max_size=20), bodies, finishes)
def test_responses_deltas_joined_are_the_whole_answer_however_events_are_batched(
    events: list[wire.Event], sizes: list[int], body: dict[str, Any], reason: wire.FinishReason
) -> None:
    meta, events = meta_of(body), as_asked(events, body)
    finish = wire.Finish(reason, wire.Usage(3, 4, 1, 2))
    frames = streamed(meta, events, sizes, finish).frames
    whole = Answer()
    whole.add([*events, finish])
    response = json.loads(responses.answer(meta, [whole]))
    Response.model_validate(response)

    last, items = frames[-1], {}
    ends = {"completed": "completed", "incomplete": "incomplete", "cancelled": "failed"}
    assert last["type"] == f"response.{ends[response['status']]}"
    assert last["response"] == response
    first = ["response.created", "response.queued", "response.in_progress"]
    if not body.get("background"):
        first.remove("response.queued")
    assert [frame["type"] for frame in frames[: len(first)]] == first
    for frame in frames[:-1]:
        if "response" in frame:
            assert frame["response"]["id"] == response["id"]
            assert frame["response"]["output"] == []
        elif frame["type"] == "response.output_item.added":
            assert frame["output_index"] == len(items)
            items[frame["output_index"]] = Item(frame["item"])
        elif frame["type"] == "response.output_item.done":
            items[frame["output_index"]].item = frame["item"]
        else:
            item = items[frame["output_index"]]
            assert frame["item_id"] == item.added["id"]
            item.take(frame)
    assert [item.item for item in items.values()] == response["output"]
    for item in items.values():
        assert item.item is not None
        assert (item.added["id"], item.added["type"]) == (item.item["id"], item.item["type"])
        shown = item.item.get("content") or item.item.get("summary") or []
        assert item.parts == shown
        [said] = [part["text"] for part in shown] or [item.item.get("arguments", item.item.get("input"))]
        assert said == "".join(item.texts.values())


@given(answers(), st.lists(st.integers(1, 4), max_size=20), bodies)
def test_responses_show_every_character_that_the_model_wrote(
    events: list[wire.Event], sizes: list[int], body: dict[str, Any]
) -> None:
    meta = meta_of(body | {"tools": [FUNCTION, {**FUNCTION, "name": "f1"}]})
    events = as_asked(events, body)
    finish = wire.Finish("stop", wire.Usage(3, 4))
    output = streamed(meta, events, sizes, finish).frames[-1]["response"]["output"]
    whole = Answer()
    whole.add([*events, finish])
    said = {"message": "", "reasoning": "", "function_call": ""}
    for item in output:
        parts = item.get("content") or item.get("summary") or [{"text": item.get("arguments", "")}]
        said[item["type"]] += "".join(part["text"] for part in parts)
    calls = "".join(part.text for part in whole.calls)
    assert said == {"message": whole.text, "reasoning": whole.reasoning, "function_call": calls}
    named = [(item["call_id"], item["name"]) for item in output if item["type"] == "function_call"]
    assert named == [(part.id, part.name) for part in whole.calls]
    logprobs = [
        entry for item in output for part in item.get("content", ()) for entry in part.get("logprobs", ())
    ]
    assert len(logprobs) == len(whole.logprobs)


@given(answers(), st.lists(st.integers(1, 4), max_size=20), bodies)
def test_responses_that_fail_say_what_there_was_and_nothing_after(
    events: list[wire.Event], sizes: list[int], body: dict[str, Any]
) -> None:
    meta = meta_of(body)
    encoder, stream = ResponseStream(meta), b""
    rest = list(events)
    for size in sizes:
        batch, rest = rest[:size], rest[size:]
        stream += encoder.feed(batch) if batch else b""
    stream += encoder.fail(Failure(ErrorCode.ENGINE_FAULT, "it raised"))
    *_, last = taken_apart(stream).frames
    if not sizes or not events:
        assert last == {
            "type": "error", "sequence_number": 0, "code": "engine_fault", "message": "it raised", "param": None
        }  # fmt: skip
        return
    response = last["response"]
    assert (last["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "it raised"}
    assert all(item["status"] == "completed" for item in response["output"][:-1])
    assert [item["status"] for item in response["output"][-1:]] in ([], ["incomplete"])


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (ErrorCode.CONTEXT_EXCEEDED, "context_length_exceeded"),
        (ErrorCode.QUEUE_FULL, "rate_limit_exceeded"),
        (ErrorCode.TEMPLATE_FAILED, "invalid_prompt"),
        (ErrorCode.ENGINE_UNAVAILABLE, "server_error"),
    ],
)
def test_responses_in_the_background_fail_in_words_that_clients_know(code: ErrorCode, told: str) -> None:
    encoder = ResponseStream(meta_of({"input": "hi", "background": True}))
    encoder.queue()
    failed = encoder.stopped("failed", Failure(code, "why"))
    assert failed.error is not None
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", told, "why")


def test_responses_show_how_far_they_are() -> None:
    encoder = ResponseStream(meta_of({"input": "hi", "background": True}))
    encoder.queue()
    assert encoder.snapshot.status == "queued"
    encoder.feed([wire.Started(1), wire.Text("Hel", [1]), wire.Text("lo", [2])])
    now = json.loads(json.dumps(msgspec.to_builtins(encoder.snapshot)))
    assert (now["status"], now["output"][0]["status"]) == ("in_progress", "incomplete")
    assert now["output"][0]["content"][0]["text"] == "Hello"
    Response.model_validate(now)
