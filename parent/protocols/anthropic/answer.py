"""A whole answer in Anthropic's format, and the pieces of it that its stream has too. Pure."""

import msgspec

from parent.protocols import partial_json
from parent.protocols.base import Answer, Meta, Part
from shared import wire

_REASONS = {"stop": "end_turn", "cancelled": "end_turn", "tool_calls": "tool_use"}


class MessageUsage(msgspec.Struct, frozen=True):
    """`input_tokens` are those that had to be computed; the cached ones stand beside them."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """Text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """Thinking; nothing is signed here."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", omit_defaults=True):
    """A call. `partial_json`: its input as far as the model got, where that is not the whole of an object."""

    id: str
    name: str
    input: msgspec.Raw
    partial_json: str = ""


Block = TextBlock | ThinkingBlock | ToolUseBlock


class Message(msgspec.Struct, frozen=True, tag="message"):
    """The answer; in the beginning of a stream without content and reason."""

    id: str
    role: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


def answer(meta: Meta, answers: list[Answer]) -> bytes:
    """The body of a request that is not streamed.

    Anthropic answers nothing with an empty list. Here it is one empty text, as in the stream: clients read the first
    block's text without looking, and the SDKs' own helpers for the final text raise where there is none.
    """
    [whole] = answers
    assert whole.finish is not None
    blocks = [_block(part) for part in whole.parts] or [TextBlock("")]
    return msgspec.json.encode(message(meta, blocks, whole.finish.usage, whole.finish))


def message(meta: Meta, blocks: list[Block], used: wire.Usage, finish: wire.Finish | None = None) -> Message:
    """The message around `blocks`."""
    return Message(
        f"msg_{meta.id}",
        "assistant",
        meta.model,
        blocks,
        stop_reason(finish, meta) if finish else None,
        finish.stop_sequence if finish else None,
        usage(used),
    )


def usage(used: wire.Usage) -> MessageUsage:
    """Nothing is billed for keeping prompts, so none are told as written to the cache."""
    return MessageUsage(
        max(0, used.prompt_tokens - used.cached_tokens), 0, used.cached_tokens, used.completion_tokens
    )


def stop_reason(finish: wire.Finish, meta: Meta) -> str:
    """Why the answer ended; one that ran out of context before `max_tokens` says so."""
    if finish.reason == "length":
        wanted = meta.asked.max_tokens
        is_short = wanted is not None and finish.usage.completion_tokens < wanted
        return "model_context_window_exceeded" if is_short else "max_tokens"
    if finish.reason == "stop" and finish.stop_sequence is not None:
        return "stop_sequence"
    return _REASONS[finish.reason]


def _block(part: Part) -> Block:
    if part.kind == "text":
        return TextBlock(part.text)
    if part.kind == "reasoning":
        return ThinkingBlock(part.text)
    text = part.text.strip()
    if is_object(text):
        return ToolUseBlock(part.id, part.name, msgspec.Raw(text.encode()))
    whole = partial_json.closed(text)
    given = whole if is_object(whole) else "{}"
    return ToolUseBlock(part.id, part.name, msgspec.Raw(given.encode()), text)


def is_object(text: str) -> bool:
    """Whether it is the JSON of an object."""
    try:
        msgspec.json.decode(text, type=dict)
    except (msgspec.MsgspecError, RecursionError):
        return False
    return True
