"""Anthropic's conversation to messages of the OpenAI shape, which is the internal one. Pure.

A turn of the user becomes the results of tools in their order, then its text; a turn of the assistant one message
with its text, its thinking and its calls. What this server cannot show to a model is refused by the block's place.
"""

from typing import Any

import msgspec

from parent.protocols.anthropic.tools import NOT_RUN
from parent.protocols.limits import MAX_MESSAGES, shown
from parent.protocols.refusing import invalid, unsupported

BILLING = "x-anthropic-billing-header:"
"""Claude Code puts a line with this name before its system prompt. It is for Anthropic's accounts and differs in each
request, so with it no prompt would begin like the one before.
"""
_SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "mcp_tool_result", "container_upload")

Messages = list[dict[str, Any]]


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """`source` of an image or document."""

    type: str = ""
    data: str | None = None
    content: "str | list[Block] | None" = None


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A content block of any type; fields that are not here have no effect."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    tool_use_id: str | None = None
    content: "str | list[Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `messages`."""

    role: str
    content: str | list[Block]


def conversation(system: str | list[Block] | None, turns: list[Turn]) -> Messages:
    """The messages. Raises `Refused` naming the place of what is wrong."""
    if not turns:
        raise invalid("messages", "must hold at least one message")
    if len(turns) > MAX_MESSAGES:
        raise invalid("messages", f"at most {MAX_MESSAGES} messages are possible, not {len(turns)}")
    told = _system(system or "", "system")
    messages: Messages = [{"role": "system", "content": told}] if told else []
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if turn.role == "user":
            messages += _user(turn.content, where)
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content, where))
        elif turn.role == "system":
            messages.append({"role": "system", "content": _system(turn.content, f"{where}.content")})
        else:
            raise invalid(f"{where}.role", f"must be user, assistant or system, not {shown(turn.role)}")
    return messages


def _system(content: str | list[Block], where: str) -> str:
    texts = [content] if isinstance(content, str) else _texts(content, where)
    return "\n".join(filter(None, map(_without_billing, texts)))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING) else text


def _user(content: str | list[Block], where: str) -> Messages:
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results: Messages = []
    texts: list[str] = []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        if block.type == "tool_result":
            results.append(_result(block, place))
        else:
            texts.append(_text(block, place))
    said = [{"role": "user", "content": "\n".join(texts)}] if texts or not results else []
    return results + said


def _result(block: Block, where: str) -> dict[str, Any]:
    """That it is an error has no place of its own in the internal form, so the text says it, if it does not yet."""
    if not block.tool_use_id:
        raise invalid(f"{where}.tool_use_id", "must be there: the id of the tool_use block it belongs to")
    content = block.content or ""
    if isinstance(content, dict):
        raise invalid(f"{where}.content", "must be a string or a list of blocks, not an object")
    text = content if isinstance(content, str) else "\n".join(_texts(content, f"{where}.content"))
    if block.is_error and "error" not in text[:40].lower():
        text = f"Error: {text}" if text else "Error"
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _assistant(content: str | list[Block], where: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        if block.type == "thinking":
            thoughts.append(_given(block.thinking, f"{place}.thinking"))
        elif block.type == "tool_use":
            calls.append(_call(block, place))
        elif block.type != "redacted_thinking":  # nobody here can read it
            texts.append(_text(block, place))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if thought := "".join(thoughts):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Block, where: str) -> dict[str, Any]:
    """The input stays the text that the client sent, so that a prompt which was sent before is the same again."""
    if not block.name:
        raise invalid(f"{where}.name", "must be the name of the tool")
    if not block.id:
        raise invalid(f"{where}.id", "must be there: results name it as tool_use_id")
    try:
        given = bytes(block.input).decode().strip()
    except UnicodeDecodeError:
        raise invalid(f"{where}.input", "is not UTF-8") from None
    if given and not given.startswith("{"):
        raise invalid(f"{where}.input", "must be an object")
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": given or "{}"},
    }


def _texts(blocks: list[Block], where: str) -> list[str]:
    return [_text(block, f"{where}[{index}]") for index, block in enumerate(blocks)]


def _text(block: Block, where: str) -> str:
    """What a block says in words."""
    kind = block.type
    if kind == "text":
        return _given(block.text, f"{where}.text")
    if kind == "document":
        return "\n".join(filter(None, [block.title, block.context, _document(block.source, where)]))
    if kind == "search_result":
        found = block.content if isinstance(block.content, list) else []
        source = block.source if isinstance(block.source, str) else None
        return "\n".join(filter(None, [block.title, source, *_plain(found, f"{where}.content")]))
    if kind == "tool_reference":
        return _given(block.tool_name, f"{where}.tool_name")
    if kind == "image":
        raise unsupported(where, "is an image, and this model takes text only")
    if kind in _SERVER_BLOCKS or kind.endswith("_tool_result"):
        raise unsupported(f"{where}.type", f"{shown(kind)} is not supported: {NOT_RUN}")
    if kind in ("tool_use", "tool_result", "thinking", "redacted_thinking"):
        raise invalid(f"{where}.type", f"a block of type {shown(kind)} has no place here")
    raise unsupported(f"{where}.type", f"{shown(kind)} is not supported: this model takes text only")


def _document(source: Source | str | None, where: str) -> str:
    if not isinstance(source, Source):
        raise invalid(f"{where}.source", "must be an object with type and data")
    if source.type == "text":
        return _given(source.data, f"{where}.source.data")
    if source.type != "content":
        raise unsupported(
            f"{where}.source.type", f"{shown(source.type)} is not supported: this model takes text only"
        )
    if isinstance(source.content, str):
        return source.content
    return "\n".join(_plain(source.content or [], f"{where}.source.content"))


def _plain(blocks: list[Block], where: str) -> list[str]:
    """Blocks of text and nothing else, so that none stands in another without end."""
    for index, block in enumerate(blocks):
        if block.type != "text":
            raise unsupported(
                f"{where}[{index}].type", f"{shown(block.type)} is not supported here, only text"
            )
    return _texts(blocks, where)


def _given(text: str | None, where: str) -> str:
    if text is None:
        raise invalid(where, "must be a string")
    return text
