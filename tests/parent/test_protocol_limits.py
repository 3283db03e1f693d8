"""What one body may hold, and where it is decoded: many small values must not hold up everybody else."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.app import Application
from parent.library.library import Library
from parent.library.machine import cpu
from parent.live_config import LiveConfig
from parent.protocols import limits
from parent.protocols.base import DecodedRequest, Manners
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import completions as openai_completions
from parent.routes.inference import DECODE_HERE, InferenceRoute
from shared import asgi, wire
from shared.errors import ErrorCode, Failure, Refused

USER = {"role": "user", "content": "hi"}


def refused(decode: Any, body: bytes) -> Failure:
    with pytest.raises(Refused) as caught:
        decode(body)
    assert caught.value.failure.code is ErrorCode.INVALID_REQUEST
    assert len(caught.value.failure.message) < 300
    return caught.value.failure


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER]} | fields).encode()


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b"{}," * limits.MAX_CONTAINERS + b"{}]}",
        b'{"messages":[],"chat_template_kwargs":{"a":[' + b"[]," * limits.MAX_CONTAINERS + b"[]]}}",
        b'{"messages":[],"unknown":[' + b"1," * (limits.MAX_VALUES + 1) + b"1]}",
        b'{"x":' + b"[" * 200_000,
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(body: bytes) -> None:
    assert "more than 100000 objects" in refused(openai_chat.decode, body).message


def test_a_prompt_of_too_many_token_ids_is_refused_and_a_long_one_is_not() -> None:
    def prompt(count: int) -> bytes:
        return b'{"prompt":[' + b"1," * (count - 1) + b"1]}"

    assert openai_completions.decode(prompt(300_000)).prompts[0] == wire.TokenPrompt([1] * 300_000)
    assert "token ids" in refused(openai_completions.decode, prompt(limits.MAX_VALUES + 2)).message


@pytest.mark.parametrize("text", ["{" * 150_000, ',"' * 600_000, '\\"{' * 150_000, "\\" * 7 + "[" * 150_000])
def test_text_may_hold_any_characters_in_any_number(text: str) -> None:
    prompt = openai_chat.decode(chat(messages=[{"role": "user", "content": text}])).prompts[0]
    assert isinstance(prompt, wire.ChatPrompt)
    assert prompt.messages[0]["content"] == text


JSON = st.recursive(
    st.text(st.sampled_from('\\",[]{}a')) | st.none(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('\\"{,')), inner),
)


@given(JSON, st.integers(1, 9))
def test_what_stands_in_strings_is_not_counted_wherever_a_block_ends(value: Any, block: int) -> None:
    def containers(value: Any) -> int:
        if isinstance(value, dict):
            return 1 + sum(map(containers, value.values()))
        return 1 + sum(map(containers, value)) if isinstance(value, list) else 0

    left = b"".join(limits.outside_strings(json.dumps(value).encode(), block))
    assert left.count(b"{") + left.count(b"[") == containers(value)
    assert b"a" not in left


def test_too_many_messages_are_refused() -> None:
    body = chat(messages=[USER] * (limits.MAX_MESSAGES + 1))
    assert refused(openai_chat.decode, body).param == "messages"
    assert openai_chat.decode(chat(messages=[USER] * limits.MAX_MESSAGES))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template_kwargs": {"a": nested(70)}}, "chat_template_kwargs"),
        ({"messages": [USER | {"extra": nested(70)}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "a": nested(70)}}]}]},
         "messages[0]"),
        ({}, None),
    ],
)  # fmt: skip
def test_what_is_nested_too_deep_is_refused_by_place(fields: dict[str, Any], param: str | None) -> None:
    body = b'{"messages":[],"unknown":' + b"[" * 50_000 if param is None else chat(**fields)
    failure = refused(openai_chat.decode, body)
    assert failure.param == param
    assert "deep in each other" in failure.message


def test_a_nested_completion_prompt_is_refused_at_any_depth() -> None:
    body = json.dumps({"prompt": nested(400)}).encode()
    assert refused(openai_completions.decode, body).param == "prompt"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_huge_number_of_tokens_means_no_limit_under_either_name(field: str) -> None:
    assert openai_chat.decode(chat(**{field: 10**30})).max_tokens == 2**63 - 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -(10**100)}, "max_tokens"),
        ({"max_completion_tokens": -(10**100)}, "max_completion_tokens"),
        ({"seed": 10**200}, "seed"),
        ({"n": -(10**200)}, "n"),
        ({"top_k": -(10**200)}, "top_k"),
        ({"messages": [{"role": "x" * 10_000, "content": ""}]}, "messages[0].role"),
        ({"reasoning_effort": "x" * 10_000}, "reasoning_effort"),
    ],
)
def test_what_a_client_sent_is_cut_in_messages(fields: dict[str, Any], param: str) -> None:
    failure = refused(openai_chat.decode, chat(**fields))
    assert failure.param == param
    assert len(failure.message) < 200


def test_a_fault_inside_an_object_is_named_by_its_field() -> None:
    body = chat(chat_template_kwargs={"a": "@"}).replace(b'"@"', b"1" * 5000)
    assert refused(openai_chat.decode, body).param == "chat_template_kwargs"


@pytest.mark.parametrize(("length", "beside"), [(10, False), (DECODE_HERE + 1, True)])
def test_a_long_body_is_decoded_beside_the_event_loop(tmp_path: Path, length: int, beside: bool) -> None:
    threads: list[threading.Thread] = []

    def decode(body: bytes, manners: Manners) -> DecodedRequest:
        threads.append(threading.current_thread())
        return openai_chat.decode(body, manners)

    async def receive() -> asgi.Message:
        return {"type": "http.request", "body": b" " * length}

    sent: list[asgi.Message] = []

    async def send(message: asgi.Message) -> None:
        sent.append(message)

    async def run() -> None:
        live = LiveConfig({"data_dir": str(tmp_path), "hf_cache": "none"}, {}, home=tmp_path)
        library = Library(lambda: live.settings, lambda: live.models)
        application = Application(live, library, cpu(1 << 33), runtime_dir=tmp_path)
        protocol = openai_chat.PROTOCOL._replace(decode=decode)
        await InferenceRoute(protocol, application.forwarder)(
            {"headers": [], "request_id": "r"}, receive, send
        )

    asyncio.run(run())
    assert sent[0]["status"] == 400
    assert (threads[0] is not threading.main_thread()) is beside
