"""Ollama's `POST /api/embed`, and `POST /api/embeddings`, as it was called first. Pure."""

from array import array
from typing import Any

import msgspec

from parent.protocols.base import PLAIN, Manners
from parent.protocols.openai import embeddings as openai_embeddings
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai.embeddings import Asked
from shared import wire


class EmbedBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/embed`. An input that is too long is cut unless `truncate` is false."""

    model: str | None = None
    input: str | list[Any] | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: float | str | None = None
    options: Any = None


class EmbeddingsBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /api/embeddings`."""

    model: str | None = None
    prompt: str | None = None
    keep_alive: float | str | None = None
    options: Any = None


class Embedded(msgspec.Struct, frozen=True):
    """The answer of `/api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class Embedding(msgspec.Struct, frozen=True):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


def decode(body: bytes, manners: Manners = PLAIN) -> Asked:
    """A body of `/api/embed`; without inputs the model is only loaded. Raises `Refused`."""
    asked = openai_fields.parse(body, EmbedBody, manners)
    openai_fields.check_count("dimensions", asked.dimensions)
    request = wire.EmbedRequest(
        inputs=openai_embeddings.inputs_of(asked.input) if asked.input else [],
        dimensions=asked.dimensions or 0,
        truncate=0 if asked.truncate is False else -1,
    )
    return Asked(
        request=request,
        model=asked.model or "",
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
    )


def decode_old(body: bytes, manners: Manners = PLAIN) -> Asked:
    """A body of `/api/embeddings`: one text. Raises `Refused`."""
    asked = openai_fields.parse(body, EmbeddingsBody, manners)
    inputs: list[wire.TextPrompt | wire.TokenPrompt] = [wire.TextPrompt(asked.prompt)] if asked.prompt else []
    return Asked(
        request=wire.EmbedRequest(inputs=inputs, truncate=-1),
        model=asked.model or "",
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
    )


def rows(found: wire.EmbedResult) -> list[list[float]]:
    """The vectors in the order of the inputs; none where nothing was read."""
    size = max(1, 4 * found.dimensions)
    vectors = found.vectors
    return [array("f", vectors[begin : begin + size]).tolist() for begin in range(0, len(vectors), size)]
