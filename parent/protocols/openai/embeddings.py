"""`POST /v1/embeddings` in the format of OpenAI, with what other servers add to it. Pure."""

import base64
from array import array
from typing import Any, Literal

import msgspec

from parent.protocols.base import PLAIN, Manners
from parent.protocols.limits import shown
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai.fields import kept_for
from parent.protocols.refusing import invalid
from shared import wire

MAX_INPUTS = 2048
MAX_ID = (1 << 31) - 1

_ROLES: dict[str, Literal["query", "document"]] = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
}


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body. `null` is the same as leaving a field out."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    input_type: str | None = None
    instruction: str | None = None
    prompt_name: str | None = None
    truncate_prompt_tokens: int | None = None
    keep_alive: float | str | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to be asked, and how the answer is written."""

    request: wire.EmbedRequest
    model: str = ""
    as_base64: bool = False
    keep_alive_s: float | None = None


def decode(body: bytes, manners: Manners = PLAIN) -> Asked:
    """Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, EmbeddingsBody, manners)
    openai_fields.check_count("dimensions", asked.dimensions)
    truncate = asked.truncate_prompt_tokens
    if truncate is not None and truncate < 1 and truncate != -1:
        raise invalid("truncate_prompt_tokens", f"must be 1 or more, or -1, not {shown(truncate)}")
    if asked.instruction and asked.prompt_name:
        raise invalid("prompt_name", "only one of instruction and prompt_name is possible")
    request = wire.EmbedRequest(
        inputs=inputs_of(asked.input),
        dimensions=asked.dimensions or 0,
        prompt=asked.instruction or "",
        prompt_name=asked.prompt_name or "",
        role=_ROLES.get((asked.input_type or "").lower(), ""),
        truncate=truncate or 0,
    )
    return Asked(
        request=request,
        model=asked.model or "",
        as_base64=asked.encoding_format == "base64",
        keep_alive_s=kept_for(asked.keep_alive),
    )


def inputs_of(given: str | list[Any]) -> list[wire.TextPrompt | wire.TokenPrompt]:
    """A text, texts, the ids of a text, or the ids of several. Raises `Refused`."""
    if isinstance(given, str):
        return [_one(given, "input")]
    if not given:
        raise invalid("input", "must not be empty")
    if _is_id(given[0]):
        return [_one(given, "input")]
    if len(given) > MAX_INPUTS:
        raise invalid(
            "input", f"at most {MAX_INPUTS} inputs are possible, not {len(given)}; send several requests"
        )
    return [_one(each, f"input[{place}]") for place, each in enumerate(given)]


def _one(given: Any, place: str) -> wire.TextPrompt | wire.TokenPrompt:
    if isinstance(given, str):
        if not given:
            raise invalid(place, "must not be an empty string")
        return wire.TextPrompt(given)
    if not isinstance(given, list):
        raise invalid(place, "must be a string or a list of token ids")
    if not given:
        raise invalid(place, "must not be an empty list")
    wrong = next((number for number, one in enumerate(given) if not _is_id(one)), None)
    if wrong is not None:
        raise invalid(f"{place}[{wrong}]", f"must be a token id, not {shown(given[wrong])}")
    return wire.TokenPrompt(given)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_ID


# ---------------------------------------------------------------- answers


class Embedding(msgspec.Struct, frozen=True):
    """One vector: numbers, or their float32, little-endian, in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class Usage(msgspec.Struct, frozen=True):
    """Tokens that were read."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True):
    """The answer."""

    data: list[Embedding]
    model: str
    usage: Usage
    object: Literal["list"] = "list"


def answer(found: wire.EmbedResult, model: str, *, as_base64: bool) -> Embeddings:
    """The vectors in the order of the inputs."""
    size = 4 * found.dimensions
    rows = (found.vectors[begin : begin + size] for begin in range(0, len(found.vectors), size))
    data = [
        Embedding(index, base64.b64encode(row).decode() if as_base64 else array("f", row).tolist())
        for index, row in enumerate(rows)
    ]
    return Embeddings(data, model, Usage(found.tokens, found.tokens))
