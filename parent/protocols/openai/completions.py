"""`POST /v1/completions`: plain text in, plain text out. Pure.

A stream has no opener: one chunk per batch of events that holds text, for each choice a terminal chunk, `[DONE]`.
Usage is given once, as in `openai_chat_stream`. The prompt is a string, a list of token ids, or a list of such
prompts, each of which is answered `n` times; choices are numbered prompt by prompt.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from parent.protocols import sampling, sse
from parent.protocols.base import PLAIN, Answer, DecodedRequest, Manners, Meta, Protocol
from parent.protocols.logprobs import TextLogprobs, TextLogprobsWriter
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai import structured as openai_structured
from parent.protocols.openai.fields import CommonBody
from parent.protocols.openai.usage import OpenAiUsage, Tally, usage_of
from parent.protocols.refusing import invalid, unsupported
from shared import wire
from shared.errors import Failure


class TextBody(CommonBody, frozen=True, kw_only=True):
    """The fields that are read; see `CommonBody`."""

    prompt: Any
    logprobs: bool | int | None = None
    best_of: int | None = None
    echo: bool | None = None


def decode(body: bytes, manners: Manners = PLAIN) -> DecodedRequest:
    """Bytes of a client to a request. Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, TextBody, manners)
    openai_fields.check_common(asked)
    prompts = _prompts(asked.prompt)
    n = openai_fields.choices(asked, len(prompts))
    if asked.best_of not in (None, n):
        raise unsupported("best_of", "other than n is not supported")
    top = _logprobs(asked.logprobs)
    if asked.echo and top is not None:
        raise unsupported("logprobs", "of a prompt are not supported: leave out echo or logprobs")
    return DecodedRequest(
        prompts=prompts,
        n=n,
        model=asked.model or "",
        stream=bool(asked.stream),
        include_usage=openai_fields.wants_usage(asked),
        usage_with_every_chunk=openai_fields.wants_running_usage(asked),
        sampling=sampling.sampling(asked),
        logprobs=top,
        grammar=openai_structured.grammar(asked),
        echo=bool(asked.echo),
        max_tokens=sampling.clamped(asked.max_tokens),
        stop=openai_fields.stops(asked),
        seed=openai_fields.seed(asked),
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
        adapter=openai_fields.adapter(asked),
        split_reasoning=False,
    )


def _logprobs(given: bool | int | None) -> int | None:
    """A number of likely tokens beside each token; 0, or true, tells the token's own."""
    if given is None or given is False:
        return None
    return openai_fields.top_logprobs("logprobs", 0 if given is True else given)


def _prompts(given: Any) -> list[wire.Prompt]:
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        if len(given) > openai_fields.MAX_CHOICES:
            raise invalid(
                "prompt", f"at most {openai_fields.MAX_CHOICES} prompts are possible, not {len(given)}"
            )
        return [_prompt(each) for each in given]
    return [_prompt(given)]


def _prompt(given: Any) -> wire.Prompt:
    if isinstance(given, str):
        if not given:
            raise invalid("prompt", "must not be empty")
        return wire.TextPrompt(given)
    if isinstance(given, list) and given and all(type(token) is int for token in given):
        if not all(0 <= token <= sampling.MAX_INT for token in given):
            raise invalid("prompt", "a token id must not be negative or beyond 64 bits")
        return wire.TokenPrompt(given)
    raise invalid("prompt", "must be a string, a list of token ids, or a list of these")


# ---------------------------------------------------------------- answers


class Choice(msgspec.Struct, frozen=True):
    """A choice, of a chunk or of an answer."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None = None


class TextCompletion(msgspec.Struct, frozen=True, omit_defaults=True):
    """`text_completion`, a chunk as well as a whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[Choice]
    usage: OpenAiUsage | None = None
    system_fingerprint: str = ""


def _completion(meta: Meta, choices: Sequence[Choice], usage: OpenAiUsage | None) -> TextCompletion:
    return TextCompletion(
        f"cmpl-{meta.id}", "text_completion", meta.created, meta.model, choices, usage, meta.fingerprint
    )


class TextStream:
    """Encodes one stream. Reasoning is text here: a plain completion has no other place for it."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        asked = meta.asked
        self._tally = Tally(meta.num_choices, asked.n)
        self._running = meta.num_choices
        self._lacks_echo = [asked.echo] * meta.num_choices
        self._logprobs = [TextLogprobsWriter() for _ in range(meta.num_choices)]
        self._is_plain = asked.logprobs is None and not asked.usage_with_every_chunk
        self._around: list[tuple[bytes, bytes] | None] = [None] * meta.num_choices  # the token path

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """One chunk with the text of the batch; comments for prefill."""
        if len(events) == 1:  # nearly always
            around = self._around[choice]
            if around is not None:
                only = events[0]
                if isinstance(only, (wire.Text, wire.Reasoning)) and only.text:
                    before, after = around
                    return before + sse.encode(only.text) + after
        usage = None
        if self._meta.asked.usage_with_every_chunk:
            self._tally.take(events, choice)
            usage = self._tally.total()
        text = self._echoed(events, choice) + "".join(
            event.text for event in events if isinstance(event, (wire.Text, wire.Reasoning))
        )
        told = None
        if self._meta.asked.logprobs is not None:
            found = [each for event in events if isinstance(event, wire.Text) for each in event.logprobs]
            told = self._logprobs[choice].write(found) if found else None
        frames = sse.prefill_comments(events)
        if text or told:
            frames.append(self._frame([Choice(choice, text, None, told)], usage))
        if self._is_plain and self._around[choice] is None and not self._lacks_echo[choice]:
            self._around[choice] = sse.around(self._frame([Choice(choice, sse.MARK, None)]))
        return b"".join(frames)

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        asked = self._meta.asked
        self._tally.finish(finish, choice)
        self._running -= 1
        is_last = not self._running
        shows_usage = asked.usage_with_every_chunk or (is_last and not asked.include_usage)
        usage = self._tally.total() if shows_usage else None
        frames = self._frame([Choice(choice, "", _finish_reason(finish))], usage)
        if is_last and asked.include_usage:
            frames += self._frame((), self._tally.total())
        return frames + sse.DONE if is_last else frames

    def fail(self, failure: Failure) -> bytes:
        return sse.data(openai_fields.error_frame(failure))

    def _echoed(self, events: list[wire.Event], choice: int) -> str:
        """The prompt's text, once, before the first of the answer."""
        if self._lacks_echo[choice]:
            for event in events:
                if isinstance(event, wire.Started):
                    self._lacks_echo[choice] = False
                    return event.prompt
        return ""

    def _frame(self, choices: Sequence[Choice], usage: OpenAiUsage | None = None) -> bytes:
        return sse.data(_completion(self._meta, choices, usage))


def answer(meta: Meta, answers: list[Answer]) -> bytes:
    """The body of a request that is not streamed."""
    finishes = [whole.finish for whole in answers if whole.finish is not None]
    choices = [
        Choice(
            choice,
            (whole.prompt if meta.asked.echo else "") + _text(whole),
            _finish_reason(finish),
            TextLogprobsWriter().write(whole.logprobs) if meta.asked.logprobs is not None else None,
        )
        for choice, (whole, finish) in enumerate(zip(answers, finishes, strict=True))
    ]
    return msgspec.json.encode(_completion(meta, choices, usage_of(finishes, meta.asked.n)))


def _text(whole: Answer) -> str:
    return "".join(part.text for part in whole.parts if part.kind != "tool_call")


def _finish_reason(finish: wire.Finish) -> str:
    """OpenAI has no word for a cancelled answer; nobody is there to read it either."""
    return "stop" if finish.reason == "cancelled" else finish.reason


PROTOCOL = Protocol("openai_completions", "/v1/completions", decode, TextStream, answer, openai_fields.error)
