"""Anthropic's stream: whatever the batches, valid events that the official SDK puts together to the whole answer."""

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st
from jiter import from_json

from parent.protocols import partial_json
from parent.protocols.anthropic import errors as anthropic_errors
from parent.protocols.anthropic import request as anthropic
from parent.protocols.base import STATUS, Answer, DecodedRequest, Meta, retry_headers
from shared import wire
from shared.errors import RETRYABLE, ErrorCode, Failure

PROMPT = wire.ChatPrompt([{"role": "user", "content": "hi"}])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
objects = st.dictionaries(texts, values, max_size=4)


@st.composite
def calls(draw: st.DrawFn, index: int) -> list[wire.Event]:
    """One call in pieces, the last of an answer perhaps cut off."""
    written = json.dumps(
        draw(objects), ensure_ascii=draw(st.booleans()), indent=draw(st.none() | st.integers(0, 2))
    )
    written = draw(st.sampled_from(["", " ", "\n"])) + written
    cuts = sorted(draw(st.lists(st.integers(0, len(written)), max_size=4)))
    if draw(st.booleans()):
        cuts.append(len(written))
    pieces = [written[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]
    first = wire.ToolCall(index, "", f"call_{index}", f"f{index}", [1])
    return [first, *(wire.ToolCall(index, piece, ids=[1]) for piece in pieces)]


@st.composite
def answers(draw: st.DrawFn) -> list[wire.Event]:
    """The events of an answer without its end."""
    events: list[wire.Event] = []
    count = 0
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["text", "reasoning", "call", "prefill", "started"]))
        if kind == "call":
            events += draw(calls(count))
            count += 1
        elif kind == "prefill":
            events.append(wire.Prefill(1, 2))
        elif kind == "started":
            events.append(wire.Started(7, 3, 5))
        else:
            event = wire.Text if kind == "text" else wire.Reasoning
            events.append(event(draw(texts), [1]))
    return events


finishes = st.builds(
    wire.Finish,
    st.sampled_from(["stop", "length", "tool_calls", "cancelled"]),
    st.just(wire.Usage(9, 4, 2, 1)),
    stop_sequence=st.none() | st.just("END"),
)


def frames_of(body: bytes) -> list[dict[str, Any]]:
    """The JSON of all events; every rule of the framing is checked on the way."""
    frames = body.decode().split("\n\n")
    assert frames.pop() == ""
    found = []
    for frame in frames:
        if frame.startswith(": "):
            assert "\n" not in frame
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def streamed(events: list[wire.Event], sizes: list[int], finish: wire.Finish, meta: Meta) -> bytes:
    encoder, rest, body = anthropic.PROTOCOL.stream(meta), list(events), b""
    for size in [*sizes, len(rest)]:
        batch, rest = rest[:size], rest[size:]
        body += encoder.feed(batch) if batch else b""
    return body + encoder.finish(finish)


def put_together(frames: list[dict[str, Any]]) -> dict[str, Any]:
    """As the official SDK does it."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for frame in frames:
        if frame["type"] != "ping":
            snapshot = accumulate_event(event=frame, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    return Message.model_validate(snapshot.model_dump()).model_dump(exclude_none=True)


@given(answers(), st.lists(st.integers(1, 4), max_size=12), finishes, st.none() | st.integers(1, 9))
def test_anthropic_sdk_puts_any_stream_together_to_the_whole_answer(
    events: list[wire.Event], sizes: list[int], finish: wire.Finish, most: int | None
) -> None:
    meta = Meta("1" * 32, 1, 'name "￼"', DecodedRequest(prompts=[PROMPT], max_tokens=most))
    frames = frames_of(streamed([wire.Started(9, 2), *events], sizes, finish, meta))
    answer = Answer()
    answer.add([*events, finish])
    raw = json.loads(anthropic.PROTOCOL.answer(meta, [answer]))
    cut_off = [block.pop("partial_json", None) for block in raw["content"]]
    whole = Message.model_validate(raw).model_dump(exclude_none=True)
    assert put_together(frames) == whole
    parts = [part for part in answer.parts if part.kind == "tool_call"]
    kept = [part.text for part in parts if not is_object(part.text)]
    assert [each for each in cut_off if each is not None] == [text.strip() for text in kept if text.strip()]
    assert raw["model"] == 'name "￼"'


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@given(answers(), st.lists(st.integers(1, 4), max_size=12), finishes)
def test_anthropic_blocks_open_and_close_one_after_the_other(
    events: list[wire.Event], sizes: list[int], finish: wire.Finish
) -> None:
    meta = Meta("1", 1, "m", DecodedRequest(prompts=[PROMPT]))
    frames = frames_of(streamed(events, sizes, finish, meta))
    kinds = [frame["type"] for frame in frames]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    opened, count = False, 0
    for frame in frames[2:-2]:
        if frame["type"] == "content_block_start":
            assert not opened
            opened, count = True, count + 1
            kind = frame["content_block"]["type"]
        assert opened
        assert frame["index"] == count - 1
        if frame["type"] == "content_block_stop":
            opened = False
        elif frame["type"] == "content_block_delta":
            wanted = {"text": ["text_delta"], "tool_use": ["input_json_delta"]}
            assert frame["delta"]["type"] in wanted.get(kind, ["thinking_delta", "signature_delta"])
    assert not opened
    assert count > 0


def test_anthropic_counts_of_the_prompt_come_first_and_last() -> None:
    meta = Meta("1", 1, "m", DecodedRequest(prompts=[PROMPT], max_tokens=4))
    finish = wire.Finish("length", wire.Usage(9, 4, 2, 1))
    frames = frames_of(streamed([wire.Started(9, 2), wire.Text("a", [1])], [1, 1], finish, meta))
    counts = {"input_tokens": 7, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    assert frames[0]["message"]["usage"] == counts | {"output_tokens": 0}
    assert frames[-2]["usage"] == counts | {"output_tokens": 4}
    assert frames[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}


# ---------------------------------------------------------------- calls that were cut off


@given(objects, st.none() | st.integers(0, 2), st.booleans(), st.data())
def test_anthropic_any_beginning_of_an_input_is_read_as_the_sdk_reads_it(
    value: Any, indent: int | None, ascii_only: bool, data: st.DataObject
) -> None:
    written = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    start = written[: data.draw(st.integers(1, len(written)))]
    assert from_json(partial_json.closed(start).encode()) == from_json(start.encode(), partial_mode=True)


@given(st.text(st.sampled_from('{}[]",:\\ae1-. tfn\n'), max_size=30))
def test_anthropic_no_text_whatever_breaks_the_reading_of_a_call(written: str) -> None:
    answer = Answer()
    answer.add([wire.ToolCall(0, written, "id", "f", [1]), wire.Finish("length", wire.Usage(1, 1))])
    meta = Meta("1", 1, "m", DecodedRequest(prompts=[PROMPT]))
    [block] = json.loads(anthropic.PROTOCOL.answer(meta, [answer]))["content"]
    assert isinstance(block["input"], dict)
    assert is_object(written) or not written.strip() or block["partial_json"] == written.strip()


# ---------------------------------------------------------------- failures

STATUSES = {
    ErrorCode.INVALID_REQUEST: (400, "invalid_request_error"),
    ErrorCode.UNSUPPORTED: (400, "invalid_request_error"),
    ErrorCode.TEMPLATE_FAILED: (400, "invalid_request_error"),
    ErrorCode.FORBIDDEN: (403, "permission_error"),
    ErrorCode.NOT_FOUND: (404, "not_found_error"),
    ErrorCode.MODEL_NOT_FOUND: (404, "not_found_error"),
    ErrorCode.REQUEST_TIMEOUT: (408, "timeout_error"),
    ErrorCode.TOO_LARGE: (413, "request_too_large"),
    ErrorCode.QUEUE_FULL: (429, "rate_limit_error"),
    ErrorCode.INTERNAL: (500, "api_error"),
    ErrorCode.ENGINE_FAULT: (500, "api_error"),
    ErrorCode.DEADLINE: (504, "timeout_error"),
    ErrorCode.LOADING: (529, "overloaded_error"),
    ErrorCode.ENGINE_UNAVAILABLE: (529, "overloaded_error"),
    ErrorCode.SHUTTING_DOWN: (529, "overloaded_error"),
}


@pytest.mark.parametrize("code", ErrorCode)
def test_anthropic_every_error_has_a_status_a_type_and_a_word_on_retrying(code: ErrorCode) -> None:
    failure = Failure(code, "what is wrong", "field")
    status, body = anthropic.PROTOCOL.error(failure, "req_1")
    frame = json.loads(body)
    kind = frame["error"].pop("type")
    assert STATUSES.get(code, (status, kind)) == (status, kind)
    assert frame == {"type": "error", "error": {"message": "what is wrong"}, "request_id": "req_1"}
    assert status == STATUS[code] or status == 529
    assert (b"retry-after" in dict(retry_headers(failure))) is (code in RETRYABLE)
    meta = Meta("1", 1, "m", DecodedRequest(prompts=[PROMPT]), request_id="req_1")
    [event] = frames_of(anthropic.PROTOCOL.stream(meta).fail(failure))
    assert event == json.loads(body)


@pytest.mark.parametrize("code", [ErrorCode.CONTEXT_EXCEEDED, ErrorCode.CANNOT_FIT])
def test_anthropic_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_look_for(
    code: ErrorCode,
) -> None:
    failure = Failure(code, "ours", "messages", tokens=5000, most_tokens=4095)
    status, body = anthropic.PROTOCOL.error(failure)
    error = json.loads(body)["error"]
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert (
        error["message"]
        == "prompt is too long: 5000 tokens > 4095 maximum; shorten it by at least 905 tokens"
    )


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (405, "invalid_request_error")],
)
def test_anthropic_a_status_that_the_front_door_has_decided_names_the_type(status: int, kind: str) -> None:
    code, body = anthropic_errors.error(Failure(ErrorCode.FORBIDDEN, "no"), "r", status)
    assert (code, json.loads(body)["error"]["type"]) == (status, kind)
