"""`POST /v1/completions`: plain text in, plain text out. Pure.

A stream has no opener: one chunk per batch of events that holds text, a terminal chunk, `[DONE]`. Usage is
given once, as in `openai_chat`. The prompt is a string, one list of token ids, or a list with one of these.
"""

from typing import Any

import msgspec

from parent.protocols import openai_fields, sse
from parent.protocols.base import PLAIN, Answer, DecodedRequest, Manners, Meta, Protocol
from parent.protocols.openai_fields import CommonBody, OpenAiUsage, invalid, unsupported
from shared import wire
from shared.errors import Failure


class TextBody(CommonBody, frozen=True, kw_only=True):
    """The fields that are read; see `CommonBody`."""

    prompt: Any
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


def decode(body: bytes, manners: Manners = PLAIN) -> DecodedRequest:
    """Bytes of a client to a request. Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, TextBody)
    openai_fields.check_common(asked)
    if asked.logprobs is not None and asked.logprobs is not False:  # 0 asks for the chosen token's
        raise unsupported("logprobs")
    if asked.best_of not in (None, 1):
        raise unsupported("best_of", "above 1 is not supported")
    if asked.echo:
        raise unsupported("echo")
    if asked.suffix:
        raise unsupported("suffix")
    return DecodedRequest(
        prompts=[_prompt(asked.prompt)],
        model=asked.model or "",
        stream=bool(asked.stream),
        include_usage=openai_fields.wants_usage(asked),
        sampling=openai_fields.sampling(asked),
        max_tokens=openai_fields.clamped(asked.max_tokens),
        stop=openai_fields.stops(asked),
        seed=openai_fields.seed(asked),
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
        split_reasoning=False,
    )


def _prompt(prompt: Any, *, listed: bool = False) -> wire.TextPrompt | wire.TokenPrompt:
    if isinstance(prompt, str):
        if not prompt:
            raise invalid("prompt", "must not be empty")
        return wire.TextPrompt(prompt)
    if isinstance(prompt, list) and prompt:
        if all(type(token) is int for token in prompt):
            if not all(0 <= token <= openai_fields.MAX_INT for token in prompt):
                raise invalid("prompt", "a token id must not be negative or beyond 64 bits")
            return wire.TokenPrompt(prompt)
        if isinstance(prompt[0], str | list) and not listed:
            if len(prompt) > 1:
                raise unsupported("prompt", "with more than one prompt is not supported")
            return _prompt(prompt[0], listed=True)
    raise invalid("prompt", "must be a string, a list of token ids, or a list with one of these")


# ---------------------------------------------------------------- answers


class Choice(msgspec.Struct, frozen=True):
    """The one choice, of a chunk or of an answer."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class TextCompletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """`text_completion`, a chunk as well as a whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice] | tuple[()]
    usage: OpenAiUsage | None = None


def _completion(meta: Meta, choices: list[Choice] | tuple[()], usage: OpenAiUsage | None) -> TextCompletion:
    return TextCompletion(f"cmpl-{meta.id}", "text_completion", meta.created, meta.model, choices, usage)


class TextStream:
    """Encodes one stream. Reasoning is text here: a plain completion has no other place for it."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._before, self._after = sse.around(self._frame([Choice(0, sse.MARK, None)]))

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """One chunk with the text of the batch; comments for prefill."""
        text = "".join(event.text for event in events if isinstance(event, (wire.Text, wire.Reasoning)))
        frames = sse.prefill_comments(events)
        if text:
            frames.append(self._before + sse.encode(text) + self._after)
        return b"".join(frames)

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        usage = openai_fields.usage(finish)
        last = [Choice(0, "", openai_fields.finish_reason(finish))]
        if not self._meta.asked.include_usage:
            return self._frame(last, usage) + sse.DONE
        return self._frame(last) + self._frame((), usage) + sse.DONE

    def fail(self, failure: Failure) -> bytes:
        return sse.data(openai_fields.error_frame(failure))

    def _frame(self, choices: list[Choice] | tuple[()], usage: OpenAiUsage | None = None) -> bytes:
        return sse.data(_completion(self._meta, choices, usage))


def answer(meta: Meta, answers: list[Answer]) -> bytes:
    """The body of a request that is not streamed."""
    [whole] = answers
    assert whole.finish is not None
    choice = Choice(0, whole.reasoning + whole.text, openai_fields.finish_reason(whole.finish))
    return msgspec.json.encode(_completion(meta, [choice], openai_fields.usage(whole.finish)))


PROTOCOL = Protocol("openai_completions", "/v1/completions", decode, TextStream, answer, openai_fields.error)
