"""`POST /v1/messages`: a client's body to a request; and that of `/v1/messages/count_tokens`. Pure.

The answers are in `anthropic_stream` and `anthropic_answer`.
"""

from typing import Any

import msgspec

from parent.protocols import sampling, text
from parent.protocols.anthropic.answer import answer
from parent.protocols.anthropic.blocks import Block, Turn, conversation
from parent.protocols.anthropic.errors import error
from parent.protocols.anthropic.stream import PING, MessageStream
from parent.protocols.anthropic.tools import ChoiceField, ToolField, offer
from parent.protocols.base import PLAIN, DecodedRequest, Manners, Protocol
from parent.protocols.limits import shown
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai import structured as openai_structured
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.sampling import MAX_INT, SamplingFields
from shared import wire

EFFORTS = ("low", "medium", "high", "xhigh", "max")
THINKING = ("enabled", "disabled", "adaptive", "between_tools")
MAX_STOPS = 64


class ThinkingField(msgspec.Struct, frozen=True, kw_only=True):
    """`thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class FormatField(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config.format`, and `output_format`, as it was called first."""

    type: str
    schema: dict[str, Any] | None = None
    name: str | None = None


class OutputField(msgspec.Struct, frozen=True, kw_only=True):
    """`output_config`."""

    effort: str | None = None
    format: FormatField | None = None
    task_budget: Any = None


class KnownFields(SamplingFields, frozen=True, kw_only=True):
    """What a body may hold, to a strict server. `null` is the same as leaving a field out.

    `seed`, `keep_alive` and the fields of sampling that Anthropic does not have are those of our other formats.
    """

    messages: Any
    system: Any = None
    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    tools: list[ToolField] | None = None
    tool_choice: ChoiceField | None = None
    thinking: ThinkingField | None = None
    output_config: OutputField | None = None
    output_format: FormatField | None = None
    seed: int | None = None
    keep_alive: float | str | None = None
    # of a service with accounts, caches and houses of its own: without effect here
    metadata: Any = None
    service_tier: Any = None
    cache_control: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    betas: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    # not here: accepted only where they ask for nothing
    container: Any = None
    mcp_servers: Any = None


class MessagesBody(KnownFields, frozen=True, kw_only=True):
    """The fields that are read."""

    messages: list[Turn]
    system: str | list[Block] | None = None


class TokenCount(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


def decode(body: bytes, manners: Manners = PLAIN) -> DecodedRequest:
    """Bytes of a client to a request. Raises `Refused` naming the field at fault."""
    asked = _parse(body, manners)
    if asked.max_tokens is None:
        raise invalid("max_tokens", "must be there: the most tokens that the answer may have")
    return _request(asked)


def decode_count(body: bytes, manners: Manners = PLAIN) -> text.Rendering:
    """The same of a body whose prompt is only counted. Raises `Refused`."""
    return text.Rendering(asked=_request(_parse(body, manners)))


def _parse(body: bytes, manners: Manners) -> MessagesBody:
    if manners.is_strict:  # about fields, not into messages
        openai_fields.parse(body, KnownFields, manners)
    return openai_fields.parse(body, MessagesBody, PLAIN)


def _request(asked: MessagesBody) -> DecodedRequest:
    openai_fields.check_count("max_tokens", asked.max_tokens)
    if abs(asked.seed or 0) > MAX_INT:
        raise invalid("seed", f"must be an integer of 64 bits, not {shown(asked.seed)}")
    if asked.mcp_servers or asked.container:
        name = "mcp_servers" if asked.mcp_servers else "container"
        raise unsupported(name, "is not supported: no tools are run by this server")
    tools, choice = offer(asked.tools, asked.tool_choice)
    grammar = _grammar(asked)
    kwargs, budget = _thinking(asked)
    return DecodedRequest(
        prompts=[_prompt(asked, tools, kwargs)],
        model=asked.model or "",
        stream=bool(asked.stream),
        sampling=sampling.sampling(asked),
        # An answer that has to be a call has no text whose form could matter.
        grammar=grammar if choice.mode == "auto" else None,
        tool_choice=choice,
        thinking_budget=budget,
        max_tokens=sampling.clamped(asked.max_tokens),
        stop=_stops(asked.stop_sequences or []),
        seed=None if asked.seed is None else asked.seed % (1 << 63),
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
    )


def _prompt(asked: MessagesBody, tools: list[wire.Tool], kwargs: dict[str, Any]) -> wire.ChatPrompt:
    """A last turn of the assistant is the beginning of the answer, unless it calls tools."""
    history = conversation(asked.system, asked.messages)
    last = history[-1]
    goes_on = last["role"] == "assistant" and not last.get("tool_calls")
    if goes_on and len(history) > 1 and not (last["content"] or last.get("reasoning_content")):
        history, goes_on = history[:-1], False  # an empty beginning is none
    return wire.ChatPrompt(history, kwargs, tools, goes_on)


def _thinking(asked: MessagesBody) -> tuple[dict[str, Any], int | None]:
    """How much to think: in the template's words, and as a bound in tokens."""
    kwargs: dict[str, Any] = {}
    effort = asked.output_config.effort if asked.output_config else None
    if effort is not None:
        if effort not in EFFORTS:
            raise invalid("output_config.effort", f"must be one of {', '.join(EFFORTS)}, not {shown(effort)}")
        kwargs["reasoning_effort"] = effort
    thinking = asked.thinking
    if thinking is None:
        return kwargs, None
    if thinking.type not in THINKING:
        raise invalid("thinking.type", f"must be one of {', '.join(THINKING)}, not {shown(thinking.type)}")
    kwargs["enable_thinking"] = thinking.type != "disabled"
    budget = thinking.budget_tokens
    if budget is None or thinking.type != "enabled":
        return kwargs, None
    if budget < 1:
        raise invalid("thinking.budget_tokens", f"must be 1 or more, not {shown(budget)}")
    return kwargs, min(budget, MAX_INT)


def _grammar(asked: MessagesBody) -> wire.Grammar | None:
    config = asked.output_config.format if asked.output_config else None
    found = {"output_config.format": config, "output_format": asked.output_format}
    given = {name: each for name, each in found.items() if each is not None}
    if config is not None and asked.output_format not in (None, config):
        raise invalid("output_format", "must not say something else than output_config.format")
    for name, each in given.items():
        if each.type != "json_schema":
            raise unsupported(f"{name}.type", f"{shown(each.type)} is not supported, only json_schema")
        if each.schema is None:
            raise invalid(f"{name}.schema", "must be there: the JSON schema of the answer")
        return openai_structured.json_schema(each.schema, f"{name}.schema")
    return None


def _stops(given: list[str]) -> list[str]:
    if len(given) > MAX_STOPS:
        raise invalid("stop_sequences", f"at most {MAX_STOPS} are possible, not {len(given)}")
    if "" in given:
        raise invalid("stop_sequences", "a stop sequence must not be empty")
    return given


PROTOCOL = Protocol("anthropic", "/v1/messages", decode, MessageStream, answer, error, PING)
