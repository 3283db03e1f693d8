"""An answer in Anthropic's format as server-sent events. Pure.

`message_start` waits for the worker's first word, which has the counts of the prompt; then each stretch of thinking,
text or call is a block with its own index; `message_delta` has the reason and the final counts, `message_stop` ends.
"""

import msgspec

from parent.protocols import sse
from parent.protocols.anthropic.answer import (
    Block,
    Message,
    MessageUsage,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    message,
    stop_reason,
    usage,
)
from parent.protocols.anthropic.errors import error_frame
from parent.protocols.base import Meta
from parent.protocols.runs import runs
from shared import wire
from shared.errors import Failure

PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta"):
    """More thinking."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag="signature_delta"):
    """The end of thinking."""

    signature: str = ""


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta"):
    """More of a call's input."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class MessageStart(msgspec.Struct, frozen=True, tag="message_start"):
    """The first event."""

    message: Message


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start"):
    """A block, still empty."""

    index: int
    content_block: Block


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta"):
    """A piece of a block."""

    index: int
    delta: Delta


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop"):
    """A block is whole."""

    index: int


class Stop(msgspec.Struct, frozen=True):
    """`message_delta.delta`."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta"):
    """How it ended."""

    delta: Stop
    usage: MessageUsage


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop"):
    """The last event."""


Frame = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


class MessageStream:
    """Encodes one stream; a restarted request's second `Started` shows nothing."""

    def __init__(self, meta: Meta) -> None:
        self._meta = meta
        self._is_started = False
        self._index = -1  # of the last block
        self._open: type[wire.Content] | int | None = None  # text, thinking or a call by its index
        self._around = (b"", b"")  # a piece of the open text or thinking, but for its text
        self._has_input = False  # of the open call something has been sent

    def feed(self, events: list[wire.Event], choice: int = 0) -> bytes:
        """Text, thinking and pieces of a call that stand side by side in a batch go in one event."""
        if len(events) == 1:  # nearly always
            only = events[0]
            if isinstance(only, (wire.Text, wire.Reasoning)) and type(only) is self._open and only.text:
                before, after = self._around
                return before + sse.encode(only.text) + after
        frames = []
        if not self._is_started:
            started = next((event for event in events if isinstance(event, wire.Started)), wire.Started(0))
            frames += self._start(wire.Usage(started.prompt_tokens, 0, started.cached_tokens))
        frames += sse.prefill_comments(events)
        for run in runs(events):
            if isinstance(run, wire.ToolCall):
                frames += self._call(run)
            elif run.text:
                frames += self._said(run)
        return b"".join(frames)

    def finish(self, finish: wire.Finish, choice: int = 0) -> bytes:
        """An answer without any block gets an empty text; see `anthropic_answer.answer`."""
        frames = [] if self._is_started else self._start(finish.usage)
        if self._index < 0:
            frames += self._begin(wire.Text, TextBlock(""))
        frames += self._end()
        stop = Stop(stop_reason(finish, self._meta), finish.stop_sequence)
        frames += [_frame(MessageDelta(stop, usage(finish.usage))), _frame(MessageStop())]
        return b"".join(frames)

    def fail(self, failure: Failure) -> bytes:
        return sse.named("error", error_frame(failure, self._meta.request_id))

    def _start(self, used: wire.Usage) -> list[bytes]:
        self._is_started = True
        used = msgspec.structs.replace(used, completion_tokens=0)
        return [_frame(MessageStart(message(self._meta, [], used))), PING]

    def _said(self, run: wire.Text | wire.Reasoning) -> list[bytes]:
        kind = type(run)
        frames = []
        if self._open is not kind:
            is_text = kind is wire.Text
            frames = self._begin(kind, TextBlock("") if is_text else ThinkingBlock(""))
            delta = TextDelta(sse.MARK) if is_text else ThinkingDelta(sse.MARK)
            self._around = sse.around(_frame(BlockDelta(self._index, delta)))
        before, after = self._around
        return [*frames, before + sse.encode(run.text) + after]

    def _call(self, run: wire.ToolCall) -> list[bytes]:
        """Clients parse what they have at each piece, so none is blank before the first that is not."""
        frames = []
        if self._open != run.index:
            frames = self._begin(run.index, ToolUseBlock(run.id, run.name, msgspec.Raw(b"{}")))
            self._has_input = False
        piece = run.arguments if self._has_input else run.arguments.lstrip()
        if piece:
            self._has_input = True
            frames.append(_frame(BlockDelta(self._index, InputDelta(piece))))
        return frames

    def _begin(self, what: type[wire.Content] | int, block: Block) -> list[bytes]:
        frames = self._end()
        self._open = what
        self._index += 1
        return [*frames, _frame(BlockStart(self._index, block))]

    def _end(self) -> list[bytes]:
        if self._open is None:
            return []
        signed = [_frame(BlockDelta(self._index, SignatureDelta()))] if self._open is wire.Reasoning else []
        self._open = None
        return [*signed, _frame(BlockStop(self._index))]


def _frame(event: Frame) -> bytes:
    return sse.named(str(event.__struct_config__.tag), event)
