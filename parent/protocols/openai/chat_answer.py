"""A chat's whole answer, and the pieces of it that its stream has too. Pure."""

import msgspec

from parent.protocols import logprobs
from parent.protocols.base import Answer, Meta
from parent.protocols.logprobs import TokenLogprob
from parent.protocols.openai.usage import OpenAiUsage, usage_of
from shared import wire


class Function(msgspec.Struct, frozen=True):
    """A call's function, or in a stream a piece of it; `arguments` is JSON as text."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str = ""


class Call(msgspec.Struct, frozen=True):
    """`message.tool_calls[]`."""

    id: str
    type: str
    function: Function


class ChoiceLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs`, of the tokens of the text."""

    content: list[TokenLogprob]
    refusal: None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """The assistant's message; thinking has one name or two."""

    role: str
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    function_call: Function | None = None


class AnswerChoice(msgspec.Struct, frozen=True):
    """One of the answers."""

    index: int
    message: Message
    finish_reason: str
    logprobs: ChoiceLogprobs | None = None


class Completion(msgspec.Struct, frozen=True, omit_defaults=True):
    """`chat.completion`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[AnswerChoice]
    usage: OpenAiUsage
    system_fingerprint: str = ""


def answer(meta: Meta, answers: list[Answer]) -> bytes:
    """The body of a request that is not streamed."""
    finishes = [whole.finish for whole in answers if whole.finish is not None]
    choices = [
        AnswerChoice(
            choice,
            _message(meta, whole),
            finish_reason(finish, meta),
            told(whole.logprobs) if meta.asked.logprobs is not None else None,
        )
        for choice, (whole, finish) in enumerate(zip(answers, finishes, strict=True))
    ]
    return msgspec.json.encode(
        Completion(
            f"chatcmpl-{meta.id}",
            "chat.completion",
            meta.created,
            meta.model,
            choices,
            usage_of(finishes, meta.asked.n),
            meta.fingerprint,
        )
    )


def _message(meta: Meta, whole: Answer) -> Message:
    thought, names, calls = whole.reasoning or None, meta.manners.reasoning, whole.calls
    as_function_call = meta.asked.as_function_call
    return Message(
        "assistant",
        whole.text or None if calls else whole.text,
        reasoning_content=thought if "reasoning_content" in names else None,
        reasoning=thought if "reasoning" in names else None,
        tool_calls=[Call(each.id, "function", Function(each.name, each.text)) for each in calls] or None
        if not as_function_call
        else None,
        function_call=Function(calls[0].name, calls[0].text) if calls and as_function_call else None,
    )


def told(found: list[wire.Logprob]) -> ChoiceLogprobs:
    """Log-probabilities of a choice, or of a chunk of it."""
    return ChoiceLogprobs(logprobs.entries(found))


def finish_reason(finish: wire.Finish, meta: Meta) -> str:
    """OpenAI has no word for a cancelled answer; nobody is there to read it either."""
    if finish.reason == "tool_calls" and meta.asked.as_function_call:
        return "function_call"
    return "stop" if finish.reason == "cancelled" else finish.reason
