"""`POST /tokenize`, `/detokenize` and `/apply-template`: what a model makes of text and messages. Pure.

Shapes are those of llama.cpp's server; vLLM's names are understood too. Messages mean what they mean to
`/v1/chat/completions`: the prompt shown is the one that it would use.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from parent.protocols.base import PLAIN, DecodedRequest, Manners
from parent.protocols.limits import shown
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import fields as openai_fields
from parent.protocols.refusing import invalid, unsupported
from shared import wire

MAX_ID = (1 << 31) - 1


class MessagesBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /apply-template`; further fields of a chat request count as there."""

    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class TokenizeBody(MessagesBody, frozen=True, kw_only=True):
    """`POST /tokenize`: a text, under one of three names, or messages."""

    content: str | None = None
    text: str | None = None
    prompt: str | None = None
    add_special: bool | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to be asked: see `wire.RenderRequest`. `asked` has the one prompt."""

    asked: DecodedRequest
    add_special: bool = True
    add_generation_prompt: bool = True
    with_pieces: bool = False


def decode_messages(body: bytes, manners: Manners = PLAIN) -> Rendering:
    """A body of `/apply-template`. Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, MessagesBody, manners)
    if asked.messages is None:
        raise invalid("messages", "must be there: the conversation to render")
    return _of_messages(body, asked)


def decode_text(body: bytes, manners: Manners = PLAIN) -> Rendering:
    """A body of `/tokenize`. Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, TokenizeBody, manners)
    texts = {name: getattr(asked, name) for name in ("content", "text", "prompt")}
    given = {name: text for name, text in texts.items() if text is not None}
    if len(given) + (asked.messages is not None) != 1:
        raise invalid("content", "one of content, text, prompt and messages must be there, and only one")
    if asked.parse_special is False:
        raise unsupported(
            "parse_special", "cannot be false: special tokens in a text are always read as such"
        )
    if asked.messages is not None:
        return msgspec.structs.replace(_of_messages(body, asked), with_pieces=bool(asked.with_pieces))
    adds = asked.add_special if asked.add_special is not None else asked.add_special_tokens
    [text] = given.values()
    return Rendering(
        asked=DecodedRequest(prompts=[wire.TextPrompt(text)], model=asked.model or ""),
        add_special=adds is not False,
        with_pieces=bool(asked.with_pieces),
    )


def decode_ids(body: bytes, manners: Manners = PLAIN) -> DetokenizeBody:
    """A body of `/detokenize`. Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, DetokenizeBody, manners)
    wrong = next((n for n, token in enumerate(asked.tokens) if not 0 <= token <= MAX_ID), None)
    if wrong is not None:
        raise invalid(f"tokens[{wrong}]", f"must be a token id, not {shown(asked.tokens[wrong])}")
    return asked


def _of_messages(body: bytes, asked: MessagesBody) -> Rendering:
    """`add_generation_prompt` false: nothing is asked of the model, so the whole conversation is shown as it is."""
    whole = asked.add_generation_prompt is False and not asked.continue_final_message
    if whole:
        fields = msgspec.json.decode(body)
        del fields["add_generation_prompt"]
        body = msgspec.json.encode({**fields, "continue_final_message": False})
    return Rendering(asked=openai_chat.decode(body), add_generation_prompt=not whole)


# ---------------------------------------------------------------- answers


class Piece(msgspec.Struct, frozen=True):
    """A token; `piece` is its text, or its bytes where they are no text by themselves."""

    id: int
    piece: str | list[int]


class Tokens(msgspec.Struct, frozen=True):
    """The answer of `/tokenize`."""

    tokens: Sequence[int | Piece]
    count: int
    max_model_len: int


class Content(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`, under the names of llama.cpp and of vLLM."""

    content: str
    prompt: str


class Applied(msgspec.Struct, frozen=True):
    """The answer of `/apply-template`; `count`: its tokens."""

    prompt: str
    count: int


def pieces(ids: list[int], spelled: list[bytes]) -> list[Piece]:
    """Each id with what it stands for."""
    return [Piece(token, _piece(piece)) for token, piece in zip(ids, spelled, strict=True)]


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
