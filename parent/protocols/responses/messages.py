"""Items of the Responses API as chat messages. Pure.

Thinking, text and calls that follow each other are one turn of the assistant: one message of the internal form. Text or
thinking after a text begins another one, but not where there are calls: their results have to follow at once.
"""

from typing import Any

import msgspec

from parent.protocols.responses.items import Item
from parent.protocols.responses.sealed import opened
from parent.protocols.responses.tools import qualified

Message = dict[str, Any]


def messages(instructions: str | None, items: list[Item]) -> list[Message]:
    """The conversation; items that are not known here are left out."""
    found: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            found.append({"role": item["role"], "content": _text(item["content"])})
        elif kind == "message":
            turn = _turn(found, is_call=False)
            turn["content"] = turn.get("content", "") + _text(item["content"])
        elif kind == "reasoning":
            if thought := _thought(item):
                turn = _turn(found, is_call=False)
                turn["reasoning_content"] = "\n\n".join(
                    filter(None, (turn.get("reasoning_content"), thought))
                )
        elif kind in ("function_call", "custom_tool_call"):
            _turn(found, is_call=True).setdefault("tool_calls", []).append(_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call_id = {"tool_call_id": item["call_id"]} if item.get("call_id") else {}
            found.append({"role": "tool", "content": _text(item["output"]), **call_id})
    return [{"content": None, **each} for each in found]


def _turn(found: list[Message], *, is_call: bool) -> Message:
    """The assistant's message that the next piece belongs to."""
    last = found[-1] if found else {"role": ""}
    if last["role"] != "assistant" or not (is_call or "content" not in last or "tool_calls" in last):
        found.append({"role": "assistant"})
    return found[-1]


def _text(content: str | list[Any]) -> str:
    """Of parts that are text, all of them."""
    if isinstance(content, str):
        return content
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)


def _thought(item: Item) -> str:
    parts = item.get("content") or item.get("summary") or ()
    return "\n\n".join(part["text"] for part in parts) or opened(item.get("encrypted_content"))


def _call(item: Item) -> Message:
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = msgspec.json.encode({"input": item["input"]}).decode()
    return {
        "id": item["call_id"],
        "type": "function",
        "function": {"name": qualified(item.get("namespace"), item["name"]), "arguments": arguments},
    }


# ---------------------------------------------------------------- truncation


def shortened(given: list[Message], share: float) -> list[Message] | None:
    """The messages without their oldest turns, so that about `share` of them is left; None: no turn can go.

    A turn begins with a message of the user or the assistant; what the system says first stays, and so does the last
    turn.
    """
    first = next((at for at, each in enumerate(given) if each["role"] not in ("system", "developer")), 0)
    sizes = [len(msgspec.json.encode(each)) for each in given]
    starts = [at for at in range(first + 1, len(given)) if given[at]["role"] in ("user", "assistant")]
    room, left, before = sum(sizes) * share - sum(sizes[:first]), sum(sizes[first:]), first
    for at in starts:
        left, before = left - sum(sizes[before:at]), at
        if left <= room or at == starts[-1]:
            return given[:first] + given[at:]
    return None
