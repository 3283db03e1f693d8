"""Bodies of `/tokenize`, `/detokenize` and `/apply-template`: what they mean, and how wrong ones are refused."""

import json
from typing import Any

import pytest

from parent.protocols import text
from parent.protocols.base import Manners
from shared import wire
from shared.errors import ErrorCode, Refused

USER = {"role": "user", "content": "hi"}
FINAL = {"role": "assistant", "content": "so"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def prompt_of(wanted: text.Rendering) -> wire.Prompt:
    [prompt] = wanted.asked.prompts
    return prompt


@pytest.mark.parametrize("name", ["content", "text", "prompt"])
def test_tokenize_takes_a_text_under_each_name(name: str) -> None:
    wanted = text.decode_text(body(**{name: "hi \x00 👩‍👩‍👧"}, model="m", unknown=1))
    assert prompt_of(wanted) == wire.TextPrompt("hi \x00 👩‍👩‍👧")
    assert (wanted.asked.model, wanted.add_special, wanted.with_pieces) == ("m", True, False)


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"add_special": False}, False),
        ({"add_special_tokens": False}, False),
        ({"add_special": True, "add_special_tokens": False}, True),
        ({"add_special": None}, True),
        ({"parse_special": True}, True),
    ],
)
def test_tokenize_adds_special_tokens_unless_told_otherwise(fields: dict[str, Any], adds: bool) -> None:
    assert text.decode_text(body(content="x", **fields)).add_special is adds


@pytest.mark.parametrize("decode", [text.decode_text, text.decode_messages])
def test_template_messages_mean_what_they_mean_to_chat(decode: Any) -> None:
    wanted = decode(body(messages=[USER, FINAL], tools=[TOOL], chat_template_kwargs={"a": 1}))
    assert prompt_of(wanted) == wire.ChatPrompt(
        [USER, FINAL], {"a": 1}, [wire.Tool("f")], continue_final=True
    )
    assert wanted.add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "goes_on", "generation"),
    [
        ({}, True, True),
        ({"add_generation_prompt": True}, False, True),
        ({"add_generation_prompt": False}, False, False),
        ({"add_generation_prompt": False, "continue_final_message": True}, True, True),
        ({"continue_final_message": True}, True, True),
        ({"continue_final_message": False}, False, True),
    ],
)
def test_template_the_end_of_the_prompt(fields: dict[str, Any], goes_on: bool, generation: bool) -> None:
    wanted = text.decode_messages(body(messages=[USER, FINAL], **fields))
    prompt = prompt_of(wanted)
    assert isinstance(prompt, wire.ChatPrompt)
    assert (prompt.continue_final, wanted.add_generation_prompt) == (goes_on, generation)
    assert len(prompt.messages) == 2


def test_template_a_conversation_may_be_shown_without_the_beginning_of_an_answer() -> None:
    assert not text.decode_messages(body(messages=[USER], add_generation_prompt=False)).add_generation_prompt


@pytest.mark.parametrize(
    ("decode", "sent", "param"),
    [
        (text.decode_text, body(), "content"),
        (text.decode_text, body(content="x", messages=[USER]), "content"),
        (text.decode_text, body(content="x", prompt="x"), "content"),
        (text.decode_text, body(content=5), "content"),
        (text.decode_text, body(content=["x"]), "content"),
        (text.decode_text, body(content="x", parse_special=False), "parse_special"),
        (text.decode_text, body(messages=[{"role": "king", "content": "x"}]), "messages[0].role"),
        (text.decode_text, b'{"content": "\\ud800"}', None),
        (text.decode_text, b'{"content": "\xff"}', None),
        (text.decode_text, b'["x"]', None),
        (text.decode_messages, body(), "messages"),
        (text.decode_messages, body(messages=[]), "messages"),
        (text.decode_messages, body(messages=[USER], tools=[{"type": "function"}]), "tools[0].function"),
        (text.decode_messages, body(messages=[USER], chat_template_kwargs=5), "chat_template_kwargs"),
        (text.decode_messages, body(messages=[USER], continue_final_message=True), "continue_final_message"),
        (text.decode_ids, body(), "tokens"),
        (text.decode_ids, body(tokens="5"), "tokens"),
        (text.decode_ids, body(tokens=[1, -1]), "tokens[1]"),
        (text.decode_ids, body(tokens=[1, 2, 1 << 31]), "tokens[2]"),
        (text.decode_ids, body(tokens=[10**30]), "tokens[0]"),
        (text.decode_ids, body(tokens=[1.5]), "tokens"),
    ],
)
def test_tokenize_and_template_refuse_a_wrong_body_by_its_field(
    decode: Any, sent: bytes, param: str | None
) -> None:
    with pytest.raises(Refused) as refused:
        decode(sent)
    failure = refused.value.failure
    assert failure.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED)
    assert (failure.param or "").partition("[...]")[0].startswith(param or "")
    assert bool(failure.param) == bool(param)


def test_tokenize_refuses_an_unknown_field_where_the_server_is_strict() -> None:
    with pytest.raises(Refused, match="with_piece"):
        text.decode_text(body(content="x", with_piece=True), Manners(is_strict=True))
    assert text.decode_text(body(messages=[USER], with_pieces=True), Manners(is_strict=True)).with_pieces


def test_tokenize_pieces_are_text_or_the_bytes_of_half_a_character() -> None:
    found = text.pieces([1, 2], [b"hi ", "é".encode()[:1]])
    assert found == [text.Piece(1, "hi "), text.Piece(2, [0xC3])]
