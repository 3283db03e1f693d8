"""`POST /v1/chat/completions`: a client's body to a request. Pure. The answers are in `openai_chat_stream` and
`openai_chat_answer`.
"""

from typing import Any

import msgspec

from parent.protocols import messages, sampling
from parent.protocols.base import PLAIN, DecodedRequest, Manners, Protocol
from parent.protocols.limits import MAX_DEPTH, is_too_deep, shown
from parent.protocols.openai import fields as openai_fields
from parent.protocols.openai import structured as openai_structured
from parent.protocols.openai import tools as openai_tools
from parent.protocols.openai.chat_answer import answer
from parent.protocols.openai.chat_stream import ChatStream
from parent.protocols.openai.fields import CommonBody
from parent.protocols.openai.tools import ChoiceField, FunctionField, NamedFunction, Offer, ToolField
from parent.protocols.refusing import invalid, unsupported
from parent.protocols.sampling import MAX_INT
from shared import wire

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class ReasoningField(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`, as OpenRouter has it."""

    effort: str | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    summary: Any = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """The fields that are read; see `CommonBody`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolField] | None = None
    tool_choice: str | ChoiceField | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionField] | None = None
    function_call: str | NamedFunction | None = None
    modalities: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning: ReasoningField | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def decode(body: bytes, manners: Manners = PLAIN) -> DecodedRequest:
    """Bytes of a client to a request. Raises `Refused` naming the field at fault."""
    asked = openai_fields.parse(body, ChatBody, manners)
    openai_fields.check_common(asked)
    openai_fields.check_count("max_completion_tokens", asked.max_completion_tokens)
    _check_modalities(asked.modalities)
    offer = _offer(asked)
    limit = asked.max_completion_tokens or asked.max_tokens
    grammar = openai_structured.grammar(asked)
    return DecodedRequest(
        prompts=[_prompt(asked, offer)],
        n=openai_fields.choices(asked),
        model=asked.model or "",
        stream=bool(asked.stream),
        include_usage=openai_fields.wants_usage(asked),
        usage_with_every_chunk=openai_fields.wants_running_usage(asked),
        sampling=sampling.sampling(asked),
        logprobs=_logprobs(asked),
        # An answer that has to be a call has no text whose form could matter.
        grammar=grammar if offer.choice.mode == "auto" else None,
        tool_choice=offer.choice,
        as_function_call=offer.is_legacy,
        thinking_budget=_thinking_budget(asked),
        max_tokens=sampling.clamped(limit),
        stop=openai_fields.stops(asked),
        seed=openai_fields.seed(asked),
        keep_alive_s=openai_fields.kept_for(asked.keep_alive),
        adapter=openai_fields.adapter(asked),
    )


def _check_modalities(given: list[str] | None) -> None:
    for each in given or ():
        if each not in ("text", "audio"):
            raise invalid("modalities", f"may hold text and audio, not {shown(each)}")
    if given and "audio" in given:
        raise unsupported("modalities", "other than text are not supported")


def _offer(asked: ChatBody) -> Offer:
    if not asked.functions:
        if asked.function_call not in (None, "none", "auto"):
            raise invalid("function_call", "a call cannot be demanded without functions")
        return openai_tools.offer(asked.tools, asked.tool_choice, parallel=asked.parallel_tool_calls)
    if asked.tools:
        raise invalid("functions", "is the old name of tools; give one of them")
    return openai_tools.legacy_offer(asked.functions, asked.function_call)


def _logprobs(asked: ChatBody) -> int | None:
    top = openai_fields.top_logprobs("top_logprobs", asked.top_logprobs or 0)
    if asked.logprobs:
        return top
    if top:
        raise invalid("top_logprobs", "needs logprobs to be true")
    return None


# ---------------------------------------------------------------- prompt


def _prompt(asked: ChatBody, offer: Offer) -> wire.ChatPrompt:
    history = messages.checked(openai_tools.modernise(asked.messages))
    last = history[-1]
    is_own = last["role"] == "assistant" and not last.get("tool_calls")
    goes_on = _goes_on(asked, is_own=is_own)
    says_nothing = not (last.get("content") or last.get("reasoning_content") or last.get("reasoning"))
    if goes_on and says_nothing and len(history) > 1:  # an empty beginning is none
        history, goes_on = history[:-1], False
    return wire.ChatPrompt(history, _template_kwargs(asked), offer.tools, goes_on)


def _goes_on(asked: ChatBody, *, is_own: bool) -> bool:
    """Whether the last message, the assistant's own, is what the answer continues."""
    adds, continues = asked.add_generation_prompt, asked.continue_final_message
    if continues and not is_own:
        raise invalid(
            "continue_final_message", "the last message must be one of the assistant, without tool_calls"
        )
    if adds and continues:
        raise invalid("add_generation_prompt", "must not be true beside continue_final_message")
    if adds is False and (continues is False or not is_own):
        raise unsupported(
            "add_generation_prompt", "can be false only where the last message, the assistant's, is continued"
        )
    return is_own and not adds and continues is not False


def _template_kwargs(asked: ChatBody) -> dict[str, Any]:
    """How much to think, in the template's words; what the client says itself wins."""
    given = asked.chat_template_kwargs or {}
    if is_too_deep(given):
        raise invalid(
            "chat_template_kwargs", f"objects and lists may stand {MAX_DEPTH} deep in each other, not more"
        )
    reasoning = asked.reasoning or ReasoningField()
    if reasoning.exclude:
        raise unsupported("reasoning.exclude")
    effort = _effort("reasoning_effort", asked.reasoning_effort)
    other = _effort("reasoning.effort", reasoning.effort)
    if effort and other and effort != other:
        raise invalid("reasoning.effort", "must not say something else than reasoning_effort")
    effort = "none" if reasoning.enabled is False else effort or other
    if effort is not None:
        return {"enable_thinking": effort != "none", "reasoning_effort": effort} | given
    return {"enable_thinking": True} | given if reasoning.enabled else given


def _effort(name: str, given: str | None) -> str | None:
    if given is not None and given not in EFFORTS:
        raise invalid(name, f"must be one of {', '.join(EFFORTS)}, not {shown(given)}")
    return given


def _thinking_budget(asked: ChatBody) -> int | None:
    """`thinking_budget`, or one of the names that others have for it."""
    given = {
        "thinking_budget": asked.thinking_budget,
        "thinking_token_budget": asked.thinking_token_budget,
        "reasoning.max_tokens": asked.reasoning.max_tokens if asked.reasoning else None,
    }
    found: int | None = None
    for name, value in given.items():
        if value is None:
            continue
        if value < 0:
            raise invalid(name, f"must be 0 or more tokens, not {shown(value)}")
        if found is not None and value != found:
            raise invalid(name, "must not say something else than another name of the same")
        found = value
    return None if found is None else min(found, MAX_INT)


PROTOCOL = Protocol("openai_chat", "/v1/chat/completions", decode, ChatStream, answer, openai_fields.error)
