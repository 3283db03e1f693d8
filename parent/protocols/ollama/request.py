"""Bodies of Ollama's `/api/chat` and `/api/generate` to requests. Pure.

One without messages, or with an empty prompt, asks for no answer but for the model to be loaded: it has no prompts.
"""

from typing import Any

import msgspec

from parent.protocols import messages
from parent.protocols.base import PLAIN, DecodedRequest, Manners
from parent.protocols.ollama import fields as ollama_fields
from parent.protocols.ollama.fields import CommonBody
from parent.protocols.openai import tools as openai_tools
from parent.protocols.openai.tools import ToolField
from parent.protocols.refusing import invalid, unsupported
from shared import wire

NO_IMAGES = "is not supported: this server takes text only"


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`messages[].tool_calls[].function`; the arguments are an object, and stay the text that they are."""

    name: str
    arguments: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    index: int | None = None
    description: Any = None


class Called(msgspec.Struct, frozen=True, kw_only=True):
    """`messages[].tool_calls[]`."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Called] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """`POST /api/chat`."""

    messages: list[Message] | None = None
    tools: list[ToolField] | None = None


class GenerateBody(CommonBody, frozen=True, kw_only=True):
    """`POST /api/generate`. `context` is what older clients send back of an answer; kept prompts do its work."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: Any = None
    # not here: accepted only where they ask for nothing
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None


def decode_chat(body: bytes, manners: Manners = PLAIN) -> DecodedRequest:
    """A body of `/api/chat`. Raises `Refused` naming the field at fault."""
    asked = ollama_fields.parse(body, ChatBody, manners)
    fields = ollama_fields.common(asked)
    kwargs = ollama_fields.template_kwargs(asked.think)
    offer = openai_tools.offer(asked.tools, None, parallel=None)
    if not asked.messages:
        return DecodedRequest(prompts=[], **fields)
    history = messages.checked(_history(asked.messages))
    last = history[-1]
    goes_on = last["role"] == "assistant" and not last.get("tool_calls")
    if goes_on and not last.get("content") and len(history) > 1:  # an empty beginning is none
        history, goes_on = history[:-1], False
    prompt = wire.ChatPrompt(history, kwargs, offer.tools, goes_on)
    return DecodedRequest(prompts=[prompt], tool_choice=offer.choice, **fields)


def decode_generate(body: bytes, manners: Manners = PLAIN) -> DecodedRequest:
    """A body of `/api/generate`. Raises `Refused` naming the field at fault."""
    asked = ollama_fields.parse(body, GenerateBody, manners)
    fields = ollama_fields.common(asked)
    kwargs = ollama_fields.template_kwargs(asked.think)
    if asked.suffix:
        raise unsupported("suffix", "is not supported: answers go on from the end of a prompt")
    if asked.template:
        raise unsupported("template", "is not supported: a model's own template is always used")
    if asked.images:
        raise unsupported("images", NO_IMAGES)
    if not asked.prompt:
        return DecodedRequest(prompts=[], **fields)
    if asked.raw:
        if asked.system:
            raise invalid("system", "has no place where raw is true; write it into the prompt")
        return DecodedRequest(prompts=[wire.TextPrompt(asked.prompt)], **fields)
    history = [{"role": "system", "content": asked.system}] if asked.system else []
    history.append({"role": "user", "content": asked.prompt})
    return DecodedRequest(prompts=[wire.ChatPrompt(history, kwargs)], **fields)


def _history(given: list[Message]) -> list[dict[str, Any]]:
    """The same conversation in the internal form. Results name the call that they are of, where they do not say it."""
    told: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # (name, id) of calls without a result
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if message.images:
            raise unsupported(f"{where}.images", NO_IMAGES)
        role = message.role.lower()
        one: dict[str, Any] = {"role": role, "content": message.content or ""}
        if message.thinking and role == "assistant":
            one["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [
                _call(call, f"call_{index}_{number}", f"{where}.tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls)
            ]
            open_calls = [(call["function"]["name"], call["id"]) for call in calls]
            one["tool_calls"] = calls
        if role == "tool":
            one |= _result(message, open_calls)
        told.append(one)
    return told


def _call(call: Called, default_id: str, where: str) -> dict[str, Any]:
    arguments = _arguments(call.function.arguments, f"{where}.function.arguments")
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id or default_id, "type": "function", "function": function}


def _arguments(given: msgspec.Raw, where: str) -> str:
    """The text of an object; also where that comes as a string, as in OpenAI's form."""
    try:
        text = bytes(given).decode().strip()
        if text.startswith('"'):
            text = msgspec.json.decode(text, type=str).strip()
    except (UnicodeDecodeError, msgspec.DecodeError):
        raise invalid(where, "is not UTF-8") from None
    if text in ("", "null"):
        return "{}"
    if not text.startswith("{"):
        raise invalid(where, "must be an object")
    return text


def _result(message: Message, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """Of a result: its name, and the id of its call; by name, else the first that has none yet."""
    name = message.tool_name or message.name
    found = {} if name is None else {"name": name}
    if message.tool_call_id:
        open_calls[:] = [each for each in open_calls if each[1] != message.tool_call_id]
        return found | {"tool_call_id": message.tool_call_id}
    mine = next((each for each in open_calls if name in (None, each[0])), None)
    if mine is None:
        return found
    open_calls.remove(mine)
    return found | {"tool_call_id": mine[1]}
