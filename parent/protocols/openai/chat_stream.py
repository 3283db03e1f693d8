"""A chat's answer as server-sent events. Pure.

A stream is: for each choice a chunk with the role (before prefill), one chunk per run of text, thinking or a call in
a batch of events, a chunk with the finish reason; at last `[DONE]`. Usage is given once per stream, so that a client
which adds up what it sees counts right: on the last choice's terminal chunk, without being asked; or, with
`stream_options.include_usage`, as OpenAI does it, in a further chunk with empty `choices`. Only
`continuous_usage_stats` puts what is used so far on every chunk.
"""

from collections.abc import Sequence

import msgspec

from parent.protocols import sse
from parent.protocols.base import Meta
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai.chat_answer import ChoiceLogprobs, Function, finish_reason, told
from parent.protocols.openai.usage import OpenAiUsage, Tally
from parent.protocols.runs import runs
from shared import wire
from shared.errors import Failure


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a call; the first of each call has `id`, `type` and the function's name."""

    index: int
    id: str = ""
    type: str = ""
    function: Function | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None
    function_call: Function | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """The one choice of a chunk."""

    index: int
    delta: Delta
    finish_reason: str | None
    logprobs: ChoiceLogprobs | msgspec.UnsetType = msgspec.UNSET


class Chunk(msgspec.Struct, frozen=True, omit_defaults=True):
    """`chat.completion.chunk`."""

    id: str
    object: str
    created: int
    model: str
    choices: Sequence[ChunkChoice]
    usage: OpenAiUsage | None = None
    system_fingerprint: str = ""


Ready = tuple[bytes, bytes, list[bytes]]
"""Chunks of one choice that are the same but for their text: what stands before and after it, and around thinking."""


class ChatStream:
    """Encodes one stream; a restarted request's second `Started` shows nothing."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        asked = meta.asked
        self._tally = Tally(meta.num_choices, asked.n)
        self._running = meta.num_choices
        self._is_opened = [False] * meta.num_choices
        self._is_plain = asked.logprobs is None and not asked.usage_with_every_chunk
        self._ready: list[Ready | None] = [None] * meta.num_choices  # the token path, where it may be taken

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """The primer goes with the first event; text and reasoning of a batch go in one chunk per run."""
        if len(events) == 1:  # nearly always
            ready = self._ready[choice]
            if ready is not None:
                only = events[0]
                if isinstance(only, wire.Text) and only.text:
                    before, after, thought = ready
                    return before + sse.encode(only.text) + after
                if isinstance(only, wire.Reasoning) and only.text:
                    before, after, thought = ready
                    return sse.encode(only.text).join(thought)
        usage = None
        if self._meta.asked.usage_with_every_chunk:
            self._tally.take(events, choice)
            usage = self._tally.total()
        frames = []
        if not self._is_opened[choice]:
            self._is_opened[choice] = True
            self._ready[choice] = self._around(choice) if self._is_plain else None
            frames.append(self._chunk(choice, Delta(role="assistant", content=""), usage=usage))
        frames += sse.prefill_comments(events)
        for run in runs(events):
            if isinstance(run, wire.Text):
                frames.append(self._text(choice, run, usage))
            elif isinstance(run, wire.Reasoning):
                frames.append(self._chunk(choice, self._thought(run.text), usage=usage))
            elif not self._meta.asked.as_function_call:
                frames.append(self._chunk(choice, Delta(tool_calls=[_call(run)]), usage=usage))
            elif run.index == 0:  # the old form has a place for one call, and only one was allowed
                frames.append(self._chunk(choice, Delta(function_call=_function(run)), usage=usage))
        return b"".join(frames)

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        frames = self.feed([], choice)
        asked = self._meta.asked
        self._tally.finish(finish, choice)
        self._running -= 1
        is_last = not self._running
        shows_usage = asked.usage_with_every_chunk or (is_last and not asked.include_usage)
        usage = self._tally.total() if shows_usage else None
        frames += self._chunk(choice, Delta(), finish_reason(finish, self._meta), usage)
        if is_last and asked.include_usage:
            frames += self._frame((), self._tally.total())
        return frames + sse.DONE if is_last else frames

    def fail(self, failure: Failure) -> bytes:
        return sse.data(openai_fields.error_frame(failure))

    def _around(self, choice: int) -> Ready:
        before, after = sse.around(self._chunk(choice, Delta(content=sse.MARK)))
        thought = self._chunk(choice, self._thought(sse.MARK))
        return before, after, sse.pieces(thought, len(self._meta.manners.reasoning))

    def _text(self, choice: int, run: wire.Text, usage: OpenAiUsage | None) -> bytes:
        if self._meta.asked.logprobs is None:
            return self._chunk(choice, Delta(content=run.text), usage=usage)
        return self._frame([ChunkChoice(choice, Delta(content=run.text), None, told(run.logprobs))], usage)

    def _thought(self, text: str) -> Delta:
        names = self._meta.manners.reasoning
        return Delta(
            reasoning_content=text if "reasoning_content" in names else None,
            reasoning=text if "reasoning" in names else None,
        )

    def _chunk(
        self, choice: int, delta: Delta, reason: str | None = None, usage: OpenAiUsage | None = None
    ) -> bytes:
        return self._frame([ChunkChoice(choice, delta, reason)], usage)

    def _frame(self, choices: Sequence[ChunkChoice], usage: OpenAiUsage | None) -> bytes:
        meta = self._meta
        return sse.data(
            Chunk(
                f"chatcmpl-{meta.id}",
                "chat.completion.chunk",
                meta.created,
                meta.model,
                choices,
                usage,
                meta.fingerprint,
            )
        )


def _function(run: wire.ToolCall) -> Function:
    return Function(run.name or msgspec.UNSET, run.arguments)


def _call(run: wire.ToolCall) -> CallDelta:
    if run.name:
        return CallDelta(run.index, run.id, "function", _function(run))
    return CallDelta(run.index, function=_function(run))
