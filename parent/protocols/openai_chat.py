"""`POST /v1/chat/completions`. Pure.

A stream is: a chunk with the role (before prefill), one chunk per batch of events, a chunk with the finish
reason, `[DONE]`. Usage is given once per stream, so that a client which adds up what it sees counts right:
on the terminal chunk, without being asked; or, with `stream_options.include_usage`, as OpenAI does it, in a
further chunk with empty `choices`.
"""

from typing import Any

import msgspec

from parent.protocols import messages, openai_fields, sse
from parent.protocols.base import PLAIN, Answer, DecodedRequest, Manners, Meta, Protocol
from parent.protocols.limits import MAX_DEPTH, is_too_deep, shown
from parent.protocols.openai_fields import CommonBody, OpenAiUsage, unsupported
from shared import wire
from shared.errors import Failure

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`."""

    type: str


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """The fields that are read; see `CommonBody`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    response_format: ResponseFormat | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None


def decode(body: bytes, manners: Manners = PLAIN) -> DecodedRequest:
    """Bytes of a client to a request. Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, ChatBody)
    openai_fields.check_common(asked)
    limit = asked.max_completion_tokens
    if limit is not None and limit < 1:
        raise openai_fields.invalid("max_completion_tokens", f"must be 1 or more, not {shown(limit)}")
    if (asked.tools or asked.functions) and asked.tool_choice != "none":
        raise unsupported("tools" if asked.tools else "functions")
    if asked.response_format is not None and asked.response_format.type != "text":
        raise unsupported("response_format", f"of type {shown(asked.response_format.type)} is not supported")
    if asked.modalities and asked.modalities != ["text"]:
        raise unsupported("modalities", "other than text are not supported")
    return DecodedRequest(
        prompts=[wire.ChatPrompt(messages.normalise(asked.messages), _template_kwargs(asked))],
        model=asked.model or "",
        stream=bool(asked.stream),
        include_usage=openai_fields.wants_usage(asked),
        sampling=openai_fields.sampling(asked),
        max_tokens=openai_fields.clamped(limit if limit is not None else asked.max_tokens),
        stop=openai_fields.stops(asked),
        seed=openai_fields.seed(asked),
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
    )


def _template_kwargs(asked: ChatBody) -> dict[str, Any]:
    """`reasoning_effort` in the template's words; what the client says itself wins."""
    effort = asked.reasoning_effort
    if is_too_deep(asked.chat_template_kwargs):
        raise openai_fields.invalid(
            "chat_template_kwargs", f"objects and lists may stand {MAX_DEPTH} deep in each other, not more"
        )
    if effort is None:
        return asked.chat_template_kwargs or {}
    if effort not in EFFORTS:
        raise openai_fields.invalid(
            "reasoning_effort", f"must be one of {', '.join(EFFORTS)}, not {shown(effort)}"
        )
    mapped = {"enable_thinking": effort != "none", "reasoning_effort": effort}
    return mapped | (asked.chat_template_kwargs or {})


# ---------------------------------------------------------------- stream


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds; `reasoning_content` is the thinking of a model that shows it."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """The one choice of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """`chat.completion.chunk`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChunkChoice] | tuple[()]
    usage: OpenAiUsage | None = None


class ChatStream:
    """Encodes one stream; a restarted request's second `Started` shows nothing."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._opened = False
        # A content chunk is the same but for its text: encoded once, then only the text (the token path).
        self._content = sse.around(self._chunk(Delta(content=sse.MARK)))
        self._reasoning = sse.around(self._chunk(Delta(reasoning_content=sse.MARK)))

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """The primer goes with the first event; text and reasoning of a batch go in one chunk per run."""
        if len(events) == 1 and self._opened:  # nearly always
            only = events[0]
            if isinstance(only, wire.Text) and only.text:
                before, after = self._content
                return before + sse.encode(only.text) + after
        frames = []
        if not self._opened:
            self._opened = True
            frames.append(self._chunk(Delta(role="assistant", content="")))
        frames += sse.prefill_comments(events)
        for is_reasoning, text in runs(events):
            before, after = self._reasoning if is_reasoning else self._content
            frames.append(before + sse.encode(text) + after)
        return b"".join(frames)

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        usage = openai_fields.usage(finish)
        reason = openai_fields.finish_reason(finish)
        opened = self.feed([])
        if not self._meta.asked.include_usage:
            return opened + self._chunk(Delta(), reason, usage) + sse.DONE
        return opened + self._chunk(Delta(), reason) + self._frame((), usage) + sse.DONE

    def fail(self, failure: Failure) -> bytes:
        return sse.data(openai_fields.error_frame(failure))

    def _chunk(self, delta: Delta, reason: str | None = None, usage: OpenAiUsage | None = None) -> bytes:
        return self._frame([ChunkChoice(0, delta, reason)], usage)

    def _frame(self, choices: list[ChunkChoice] | tuple[()], usage: OpenAiUsage | None) -> bytes:
        meta = self._meta
        return sse.data(
            Chunk(f"chatcmpl-{meta.id}", "chat.completion.chunk", meta.created, meta.model, choices, usage)
        )


def runs(events: list[wire.Event]) -> list[tuple[bool, str]]:
    """Neighbouring pieces of one kind joined: (is reasoning, text), none empty."""
    joined: list[tuple[bool, str]] = []
    for event in events:
        if isinstance(event, (wire.Text, wire.Reasoning)) and event.text:
            reasoning = isinstance(event, wire.Reasoning)
            if joined and joined[-1][0] is reasoning:
                joined[-1] = (reasoning, joined[-1][1] + event.text)
            else:
                joined.append((reasoning, event.text))
    return joined


# ---------------------------------------------------------------- whole answer


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """The assistant's message."""

    role: str
    content: str
    reasoning_content: str | None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    """The one choice of an answer."""

    index: int
    message: Message
    finish_reason: str
    logprobs: None = None


class Completion(msgspec.Struct, frozen=True):
    """`chat.completion`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: OpenAiUsage


def answer(meta: Meta, answers: list[Answer]) -> bytes:
    """The body of a request that is not streamed."""
    [whole] = answers
    assert whole.finish is not None
    choice = AnswerChoice(
        0,
        Message("assistant", whole.text, whole.reasoning or None),
        openai_fields.finish_reason(whole.finish),
    )
    return msgspec.json.encode(
        Completion(
            f"chatcmpl-{meta.id}",
            "chat.completion",
            meta.created,
            meta.model,
            [choice],
            openai_fields.usage(whole.finish),
        )
    )


PROTOCOL = Protocol("openai_chat", "/v1/chat/completions", decode, ChatStream, answer, openai_fields.error)
