"""Items of the Responses API: those of a client checked, put into one form, and turned into chat messages. Pure.

An item that is not known here (a call of a tool that runs at OpenAI, its output, …) stays in the list and is left out
of the messages. A reference to an item is resolved by whoever has the stored ones.
"""

import re
from typing import Any

from parent.protocols.limits import MAX_DEPTH, MAX_MESSAGES, is_too_deep, shown
from parent.protocols.refusing import invalid, unsupported
from shared.errors import ErrorCode, refuse

Item = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
_TEXT_OF = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_OURS = re.compile(r"[a-z]+_([0-9a-f]{32})i?\d+")
_PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip


def checked(given: str | list[Item] | None) -> list[Item]:
    """The items of `input`. Raises `Refused` naming the item and field at fault."""
    if given is None:
        return []
    if isinstance(given, str):
        return [_message({"role": "user", "content": given}, "input")]
    if len(given) > MAX_MESSAGES:
        raise invalid("input", f"at most {MAX_MESSAGES} items are possible, not {len(given)}")
    return [_checked(item, f"input[{index}]") for index, item in enumerate(given)]


def numbered(items: list[Item], request: str) -> list[Item]:
    """With an id each: the client's own, else one that tells the response."""
    return [
        item
        if isinstance(item.get("id"), str) and item["id"]
        else {**item, "id": f"{_PREFIXES.get(item['type'], 'item')}_{request}i{index}"}
        for index, item in enumerate(items)
    ]


def owner_of(item_id: str) -> str:
    """The id of the response that an item of ours belongs to. Raises `Refused` (not_found) for what is none."""
    if not (found := _OURS.fullmatch(item_id)):
        raise no_such_item(item_id)
    return f"resp_{found[1]}"


def no_such_item(item_id: str) -> Exception:
    """To raise: a reference leads nowhere."""
    return refuse(
        ErrorCode.NOT_FOUND,
        f"input: there is no stored item {shown(item_id)}; send the item itself",
        param="input",
    )


def references(items: list[Item]) -> list[str]:
    """The ids of items that are only named."""
    return [item["id"] for item in items if item["type"] == "item_reference"]


def resolved(items: list[Item], known: dict[str, Item]) -> list[Item]:
    """With the items themselves instead of their names. Raises `Refused` (not_found)."""
    found = []
    for item in items:
        if item["type"] == "item_reference":
            if item["id"] not in known:
                raise no_such_item(item["id"])
            item = known[item["id"]]
        found.append(item)
    return found


# ---------------------------------------------------------------- checks


def _checked(given: Item, where: str) -> Item:
    """In one form: what is null is the same as what is left out."""
    item = {key: value for key, value in given.items() if value is not None}
    kind = item.get("type")
    if is_too_deep(item):
        raise invalid(where, f"objects and lists may stand {MAX_DEPTH} deep in each other, not more")
    if kind is None:
        kind = "item_reference" if "role" not in item and "id" in item else "message"
    if not isinstance(kind, str):
        raise invalid(f"{where}.type", f"must be a string, not {shown(kind)}")
    if kind == "message":
        return _message(item, where)
    if kind == "item_reference":
        return {"type": kind, "id": _string(item, "id", where)}
    if kind in ("function_call", "custom_tool_call"):
        for name in ("call_id", "name", "arguments" if kind == "function_call" else "input"):
            _string(item, name, where)
        if "namespace" in item:
            _string(item, "namespace", where)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        if item.get("call_id") is not None:
            _string(item, "call_id", where)
        _check_content(item.get("output"), f"{where}.output")
    elif kind == "reasoning":
        for name in ("summary", "content"):
            _check_thought(item.get(name), f"{where}.{name}")
    return {"status": "completed", **item, "type": kind}


def _message(item: Item, where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(ROLES)}, not {shown(role)}")
    _check_content(content, f"{where}.content")
    if isinstance(content, str):
        if role == "assistant":
            content = [{"type": "output_text", "annotations": [], "logprobs": [], "text": content}]
        else:
            content = [{"type": "input_text", "text": content}]
    return {"type": "message", "status": "completed", **item, "content": content}


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise invalid(where, f"must be a string or a list of parts, not {shown(content)}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise invalid(f"{where}[{index}]", "must be an object with a type")
        if kind not in _TEXT_OF:
            raise unsupported(
                f"{where}[{index}].type", f"{shown(kind)} is not supported: this model takes text only"
            )
        _string(part, _TEXT_OF[kind], f"{where}[{index}]")


def _check_thought(parts: Any, where: str) -> None:
    if parts is None:
        return
    if not isinstance(parts, list):
        raise invalid(where, f"must be a list of parts, not {shown(parts)}")
    for index, part in enumerate(parts):
        if not isinstance(part, dict):
            raise invalid(f"{where}[{index}]", "must be an object with a text")
        _string(part, "text", f"{where}[{index}]")


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"must be a string, not {shown(value)}")
    return value
