"""The response object of the Responses API, with every key. Pure."""

from typing import Any

import msgspec
from msgspec.structs import replace

from parent.protocols.base import Answer, Meta
from parent.protocols.responses.output import Growing, Item, Status, items_of, kind_of_call
from parent.protocols.responses.request import asked_of
from shared import wire
from shared.errors import ErrorCode, Failure


class InputDetails(msgspec.Struct, frozen=True):
    """`usage.input_tokens_details`."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    """`usage.output_tokens_details`."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Of the whole response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response has failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: str


class Reasoning(msgspec.Struct, frozen=True):
    """What was asked for."""

    effort: str | None
    summary: str | None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """`response`, with every key, whatever its status."""

    id: str
    object: str = "response"
    created_at: int
    status: Status
    background: bool
    completed_at: int | None = None
    conversation: None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt: None = None
    prompt_cache_key: str | None
    reasoning: Reasoning
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


def begun(meta: Meta, status: Status = "in_progress") -> Response:
    """A response of which nothing is written."""
    asked = asked_of(meta)
    shown = asked.shown
    return Response(
        id=f"resp_{meta.id}",
        created_at=meta.created,
        status=status,
        background=shown.background,
        instructions=shown.instructions,
        max_output_tokens=asked.max_tokens,
        max_tool_calls=shown.max_tool_calls,
        model=meta.model,
        parallel_tool_calls=shown.parallel_tool_calls,
        previous_response_id=shown.previous_response_id,
        prompt_cache_key=shown.prompt_cache_key,
        reasoning=Reasoning(shown.effort, shown.summary),
        safety_identifier=shown.safety_identifier,
        store=shown.store,
        temperature=asked.sampling.temperature,
        text=shown.text,
        tool_choice=shown.tool_choice,
        tools=shown.tools,
        top_logprobs=shown.top_logprobs,
        top_p=asked.sampling.top_p,
        truncation=shown.truncation,
        user=shown.user,
        metadata=shown.metadata,
    )


_STATUS: dict[wire.FinishReason, Status] = {
    "stop": "completed", "tool_calls": "completed", "length": "incomplete", "cancelled": "cancelled"
}  # fmt: skip


def ended(response: Response, finish: wire.Finish, grown: list[Growing], now: int) -> Response:
    """The response at its end."""
    status, used = _STATUS[finish.reason], finish.usage
    return replace(
        response,
        status=status,
        completed_at=now if status == "completed" else None,
        incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
        output=items_of(grown, status),
        usage=ResponseUsage(
            used.prompt_tokens,
            InputDetails(used.cached_tokens),
            used.completion_tokens,
            OutputDetails(used.reasoning_tokens),
            used.prompt_tokens + used.completion_tokens,
        ),
    )


def whole(meta: Meta, answer: Answer, now: int | None = None) -> Response:
    """The response of a request that is not streamed. `now`: seconds since the epoch, else when it began."""
    shown = asked_of(meta).shown
    grown: list[Growing] = []
    for index, part in enumerate(answer.parts):
        if part.kind == "tool_call":
            kind = kind_of_call(part.name, shown)
            item = Growing(meta.id, index, kind, shown, part.id, part.name)
        else:
            item = Growing(meta.id, index, "message" if part.kind == "text" else "reasoning", shown)
        item.add(part.text, part.logprobs)
        item.end()
        grown.append(item)
    assert answer.finish is not None
    grown = grown or [Growing(meta.id, 0, "message", shown)]
    return ended(begun(meta), answer.finish, grown, meta.created if now is None else now)


_CODES = {
    ErrorCode.CONTEXT_EXCEEDED: "context_length_exceeded",  # what clients look for
    ErrorCode.QUEUE_FULL: "rate_limit_exceeded",
    ErrorCode.INVALID_REQUEST: "invalid_prompt",
    ErrorCode.TEMPLATE_FAILED: "invalid_prompt",
    ErrorCode.UNSUPPORTED: "invalid_prompt",
}


def error_of(failure: Failure) -> ResponseError:
    """A failure in the words that the API has for what happens once a response has begun."""
    return ResponseError(_CODES.get(failure.code, "server_error"), failure.message)
