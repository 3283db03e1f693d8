"""`POST /v1/responses`: a client's body to a request. Pure.

What is stored of earlier responses is not known here: `parse` gives a request whose own items are `items`, and
`completed` puts them, after those of the conversation so far, into its prompt. The answers are in `responses_stream`
and `responses_object`.
"""

from typing import Any

import msgspec
from msgspec.structs import replace

from parent.protocols import sampling
from parent.protocols.base import PLAIN, Answer, Manners, Meta, Protocol
from parent.protocols.limits import MAX_DEPTH, MAX_MESSAGES, is_too_deep, shown
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai import structured as openai_structured
from parent.protocols.openai.chat import EFFORTS
from parent.protocols.openai.fields import CommonBody
from parent.protocols.openai.structured import Schema
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.responses import items
from parent.protocols.responses import messages as turns
from parent.protocols.responses.items import Item
from parent.protocols.responses.object import whole
from parent.protocols.responses.request import ResponsesRequest, Shown
from parent.protocols.responses.stream import ResponseStream, error
from parent.protocols.responses.tools import Offer, offer
from shared import wire
from shared.errors import Failure

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")


class FormatField(msgspec.Struct, frozen=True, kw_only=True):
    """`text.format`. A schema is always enforced, whatever `strict` says."""

    type: str = "text"
    name: str | None = None
    description: str | None = None
    schema: Schema | None = None
    strict: bool | None = None


class TextField(msgspec.Struct, frozen=True, kw_only=True):
    """`text`."""

    format: FormatField | None = None
    verbosity: str | None = None


class ReasoningField(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`; `generate_summary` is the old name of `summary`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Any = None
    mode: Any = None


class ResponsesBody(CommonBody, frozen=True, kw_only=True):
    """The fields that are read; see `CommonBody`."""

    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    messages: Any = None
    # known, and without any effect here
    access_programs: Any = None
    background_options: Any = None
    client_metadata: Any = None
    context_management: Any = None
    image: Any = None


def parse(body: bytes, manners: Manners = PLAIN) -> ResponsesRequest:
    """Bytes of a client to a request whose prompt has no messages yet. Raises `Refused` naming the field."""
    asked = openai_fields.parse(body, ResponsesBody, manners)
    openai_fields.check_common(asked)
    _check(asked)
    found = items.checked(asked.input)
    offered = offer(asked.tools, asked.tool_choice, parallel=asked.parallel_tool_calls is not False)
    grammar = _grammar(asked)
    return ResponsesRequest(
        prompts=[wire.ChatPrompt([], _template_kwargs(asked), offered.tools)],
        model=asked.model or "",
        stream=bool(asked.stream),
        sampling=sampling.sampling(asked),
        logprobs=_logprobs(asked),
        # An answer that has to be a call has no text whose form could matter.
        grammar=grammar if offered.choice.mode == "auto" else None,
        tool_choice=offered.choice,
        thinking_budget=sampling.clamped(asked.thinking_budget),
        max_tokens=sampling.clamped(asked.max_output_tokens or asked.max_tokens),
        stop=openai_fields.stops(asked),
        seed=openai_fields.seed(asked),
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
        adapter=openai_fields.adapter(asked),
        shown=_shown(asked, offered),
        items=found,
        ignored=offered.ignored,
    )


def completed(asked: ResponsesRequest, past: list[Item], known: dict[str, Item]) -> ResponsesRequest:
    """With the messages of the conversation: `past`, then its own items, those that are only named taken from
    `known`. Raises `Refused`.
    """
    own = items.resolved(asked.items, known)
    if len(past) + len(own) > MAX_MESSAGES:
        raise invalid(
            "previous_response_id",
            f"at most {MAX_MESSAGES} items are possible in a conversation, not {len(past) + len(own)}",
        )
    messages = turns.messages(asked.shown.instructions, past + own)
    if not messages or (not own and all(each["role"] in ("system", "developer") for each in messages)):
        raise invalid("input", "must be a text or a list with at least one item")
    [prompt] = asked.prompts
    assert isinstance(prompt, wire.ChatPrompt)
    return replace(asked, prompts=[replace(prompt, messages=messages)], items=own)


def decode(body: bytes, manners: Manners = PLAIN) -> ResponsesRequest:
    """A request that stands for itself."""
    return completed(parse(body, manners), [], {})


_SPARE = 0.9  # of the context, for the answer, and as tokens are not bytes


def truncated(asked: ResponsesRequest, failure: Failure) -> ResponsesRequest | None:
    """A prompt that was too long without its oldest turns; None where none can go, or `failure` is another one."""
    if not failure.tokens or failure.most_tokens is None:
        return None
    [prompt] = asked.prompts
    assert isinstance(prompt, wire.ChatPrompt)
    share = _SPARE * min(failure.most_tokens / failure.tokens, 1)
    messages = turns.shortened(prompt.messages, share)
    return None if messages is None else replace(asked, prompts=[replace(prompt, messages=messages)])


# ---------------------------------------------------------------- fields


def _check(asked: ResponsesBody) -> None:
    for name in ("max_output_tokens", "max_tool_calls"):
        openai_fields.check_count(name, getattr(asked, name))
    if asked.max_tokens and asked.max_output_tokens not in (None, asked.max_tokens):
        raise invalid("max_tokens", "is another name of max_output_tokens and must not say another value")
    if openai_fields.choices(asked) != 1:
        raise unsupported("n", "is not supported: a response is one answer")
    if asked.messages is not None:
        raise invalid("messages", "is a field of /v1/chat/completions; here it is input")
    if asked.conversation is not None:
        raise unsupported("conversation", "is not supported; follow on with previous_response_id")
    if asked.prompt is not None:
        raise unsupported(
            "prompt", "is not supported: there are no stored prompts; send instructions and input"
        )
    if asked.truncation not in (None, "auto", "disabled"):
        raise invalid("truncation", f"must be auto or disabled, not {shown(asked.truncation)}")
    if asked.background and asked.store is False:
        raise invalid("background", "needs store: a response that runs in the background is fetched later")
    openai_fields.top_logprobs("top_logprobs", asked.top_logprobs or 0)
    if asked.thinking_budget is not None and asked.thinking_budget < 0:
        raise invalid("thinking_budget", f"must be 0 or more tokens, not {shown(asked.thinking_budget)}")
    _check_metadata(asked.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > 16:
        raise invalid("metadata", f"at most 16 pairs are possible, not {len(metadata)}")
    for key, value in metadata.items():
        if len(key) > 64 or len(value) > 512:
            raise invalid("metadata", f"a key has at most 64 characters, a value 512: {shown(key)}")


def _logprobs(asked: ResponsesBody) -> int | None:
    return asked.top_logprobs or 0 if LOGPROBS in (asked.include or ()) else None


def _grammar(asked: ResponsesBody) -> wire.Grammar | None:
    other = openai_structured.grammar(asked)
    form = asked.text.format if asked.text else None
    if form is None or form.type == "text":
        return other
    if form.type == "json_object":
        found: wire.Grammar = wire.JsonObject()
    elif form.type != "json_schema":
        raise unsupported("text.format", f"of type {shown(form.type)} is not supported")
    elif form.schema is None:
        raise invalid("text.format.schema", "must be the JSON schema of the answer")
    else:
        found = openai_structured.json_schema(form.schema, "text.format.schema")
    if other not in (None, found):
        raise invalid(
            "text.format", "asks for another form of the answer than another field; give one of them"
        )
    return found


def _template_kwargs(asked: ResponsesBody) -> dict[str, Any]:
    """How much to think, in the template's words; what the client says itself wins."""
    given = asked.chat_template_kwargs or {}
    if is_too_deep(given):
        raise invalid(
            "chat_template_kwargs", f"objects and lists may stand {MAX_DEPTH} deep in each other, not more"
        )
    effort = asked.reasoning.effort if asked.reasoning else None
    if effort is None:
        return given
    if effort not in EFFORTS:
        raise invalid("reasoning.effort", f"must be one of {', '.join(EFFORTS)}, not {shown(effort)}")
    return {"enable_thinking": effort != "none", "reasoning_effort": effort} | given


def _summary(asked: ResponsesBody) -> str | None:
    reasoning = asked.reasoning or ReasoningField()
    summary = reasoning.summary or reasoning.generate_summary
    if summary is not None and summary not in SUMMARIES:
        raise invalid("reasoning.summary", f"must be one of {', '.join(SUMMARIES)}, not {shown(summary)}")
    return summary


def _text(asked: ResponsesBody) -> dict[str, Any]:
    text = asked.text or TextField()
    if text.verbosity not in (None, *VERBOSITIES):
        raise invalid(
            "text.verbosity", f"must be one of {', '.join(VERBOSITIES)}, not {shown(text.verbosity)}"
        )
    form = text.format or FormatField()
    field: dict[str, Any] = {"type": form.type}
    if form.type == "json_schema":
        field |= {
            "name": form.name or "response",
            "description": form.description,
            "schema": form.schema,
            "strict": True,
        }
    return {"format": field, "verbosity": text.verbosity or "medium"}


def _shown(asked: ResponsesBody, offered: Offer) -> Shown:
    if is_too_deep(asked.tool_choice):
        raise invalid("tool_choice", f"objects and lists may stand {MAX_DEPTH} deep in each other, not more")
    return Shown(
        instructions=asked.instructions,
        tools=offered.shown,
        tool_choice=asked.tool_choice or "auto",
        custom=offered.custom,
        namespaced=offered.namespaced,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        previous_response_id=asked.previous_response_id,
        text=_text(asked),
        effort=asked.reasoning.effort if asked.reasoning else None,
        summary=_summary(asked),
        seals=SEALED in (asked.include or ()),
        truncation=asked.truncation or "disabled",
        store=asked.store is not False,
        background=bool(asked.background),
        max_tool_calls=asked.max_tool_calls,
        top_logprobs=asked.top_logprobs or 0,
        metadata=asked.metadata or {},
        prompt_cache_key=asked.prompt_cache_key,
        safety_identifier=asked.safety_identifier,
        user=asked.user,
    )


def answer(meta: Meta, answers: list[Answer]) -> bytes:
    """The body of a request that is not streamed."""
    return msgspec.json.encode(whole(meta, answers[0]))


PROTOCOL = Protocol("responses", "/v1/responses", decode, ResponseStream, answer, error)
