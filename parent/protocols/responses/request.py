"""A request of the Responses API in our words, with what its response repeats. Pure."""

from typing import Any

import msgspec

from parent.protocols.base import DecodedRequest, Meta


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a request that its response repeats, or that say how it is written."""

    instructions: str | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    custom: frozenset[str] = frozenset()  # names of tools whose input is free text
    namespaced: dict[
        str, tuple[str, str]
    ] = {}  # names of tools to the namespace and the name that they came by
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    text: dict[str, Any] = {}
    effort: str | None = None
    summary: str | None = None  # thinking is shown as a summary
    seals: bool = False  # thinking stands in `encrypted_content` too
    truncation: str = "disabled"
    store: bool = True
    background: bool = False
    max_tool_calls: int | None = None
    top_logprobs: int = 0
    metadata: dict[str, str] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


class ResponsesRequest(DecodedRequest, frozen=True, kw_only=True):
    """`items`: its own input. `ignored`: types of tools that were left out."""

    shown: Shown = msgspec.field(default_factory=Shown)
    items: list[dict[str, Any]] = msgspec.field(default_factory=list)
    ignored: list[str] = msgspec.field(default_factory=list)


def asked_of(meta: Meta) -> ResponsesRequest:
    """The request of an answer in this format."""
    assert isinstance(meta.asked, ResponsesRequest)
    return meta.asked
