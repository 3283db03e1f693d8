"""`POST /v1/rerank` in the format that Jina and Cohere have in common. Pure."""

from typing import Any

import msgspec

from parent.protocols.base import PLAIN, Manners
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai.fields import kept_for
from parent.protocols.refusing import invalid
from shared import wire

MAX_DOCUMENTS = 2048


class RerankBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body. A document is a text, or an object whose `text` it is."""

    query: str
    documents: list[Any]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    keep_alive: float | str | None = None


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is to be asked; so many of the best are shown, with their texts or without."""

    request: wire.RankRequest
    model: str = ""
    top_n: int = 0
    with_documents: bool = False
    keep_alive_s: float | None = None


def decode(body: bytes, manners: Manners = PLAIN) -> Asked:
    """Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, RerankBody, manners)
    openai_fields.check_count("top_n", asked.top_n)
    if not asked.query:
        raise invalid("query", "must not be an empty string")
    count = len(asked.documents)
    if not 1 <= count <= MAX_DOCUMENTS:
        raise invalid("documents", f"must be from 1 to {MAX_DOCUMENTS} documents, not {count}")
    documents = [_text(each, f"documents[{place}]") for place, each in enumerate(asked.documents)]
    return Asked(
        request=wire.RankRequest(query=asked.query, documents=documents),
        model=asked.model or "",
        top_n=min(asked.top_n or count, count),
        with_documents=bool(asked.return_documents),
        keep_alive_s=kept_for(asked.keep_alive),
    )


def _text(given: Any, place: str) -> str:
    text = given.get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise invalid(place, "must be a string, or an object with a text")
    if not text:
        raise invalid(place, "must not be empty")
    return text


# ---------------------------------------------------------------- answers


class Document(msgspec.Struct, frozen=True):
    """A document as it was sent."""

    text: str


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document by its place in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens that were read, the query as often as it was."""

    prompt_tokens: int
    total_tokens: int


class Reranked(msgspec.Struct, frozen=True):
    """The answer, the best first."""

    id: str
    model: str
    results: list[Result]
    usage: Usage


def answer(asked: Asked, found: wire.RankResult, model: str, request_id: str) -> Reranked:
    """Documents of one score stay in the order in which they were sent."""
    texts = asked.request.documents
    order = sorted(range(len(texts)), key=lambda place: -found.scores[place])[: asked.top_n]
    results = [
        Result(place, found.scores[place], Document(texts[place]) if asked.with_documents else None)
        for place in order
    ]
    return Reranked(f"rerank-{request_id}", model, results, Usage(found.tokens, found.tokens))
