"""What most templates take, made of messages that one of them has refused. Pure.

Each repair is small, changes as little as it can, and loses nothing. They are applied together, and only after a
template has refused the messages as they were sent: a template that takes them knows better. All work on messages in
form (`worker.text.messages`).
"""

import hashlib
import re
from typing import Any

from worker.text.messages import Message, Messages, Style, has_calls

_NINE = re.compile(r"length\s*!=\s*9\b|length 9\b")
_IS_NINE = re.compile(r"[A-Za-z0-9]{9}")


def repaired(messages: Messages, source: str, *, style: Style, takes_system: bool) -> Messages:
    """`source`: the template's text. `takes_system`: it has a place for a system message."""
    messages = named(linked(messages))
    if _NINE.search(source):
        messages = with_short_ids(messages)
    if style == "thinking":
        messages = [_thoughts_said(message) for message in messages]
    messages = without_empty([_with_object(message) for message in messages])
    messages = system_first(messages) if takes_system else system_in_user(messages)
    return joined(messages)


def with_user(messages: Messages) -> Messages:
    """An empty user message where the conversation does not begin with one."""
    at = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if at < len(messages) and messages[at].get("role") == "user":
        return messages
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


# ---------------------------------------------------------------- calls and their results


def linked(messages: Messages) -> Messages:
    """Calls without an id get one, results without one get that of the first call that has no result yet."""
    made: Messages = []
    waiting: dict[str, None] = {}  # ids of calls without a result, in their order
    count = 0
    for message in messages:
        if has_calls(message):
            calls = []
            for call in message["tool_calls"]:
                count += 1
                calls.append(call if call.get("id") else {**call, "id": f"call{count:05d}"})
            waiting = dict.fromkeys(str(call["id"]) for call in calls)
            message = {**message, "tool_calls": calls}
        elif message.get("role") == "tool":
            answered = message.get("tool_call_id") or next(iter(waiting), None)
            if answered:
                waiting.pop(str(answered), None)
                message = {**message, "tool_call_id": answered}
        made.append(message)
    return made


def named(messages: Messages) -> Messages:
    """Results say the name of the tool that they come from."""
    names: dict[str, Any] = {}
    made: Messages = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[str(call.get("id"))] = call["function"].get("name")
        if message.get("role") == "tool" and not message.get("name"):
            name = names.get(str(message.get("tool_call_id")))
            message = {**message, "name": name} if name else message
        made.append(message)
    return made


def with_short_ids(messages: Messages) -> Messages:
    """Ids of nine letters and digits, the same for a call and its result."""
    made: Messages = []
    for message in messages:
        if has_calls(message):
            calls = [{**call, "id": _short(call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        elif message.get("tool_call_id"):
            message = {**message, "tool_call_id": _short(message["tool_call_id"])}
        made.append(message)
    return made


def _short(given: Any) -> str:
    name = str(given)
    if _IS_NINE.fullmatch(name):
        return name
    return hashlib.blake2b(name.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def _with_object(message: Message) -> Message:
    """Arguments that are no object become one that holds them: some templates walk over its keys."""
    if not has_calls(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if not isinstance(function.get("arguments", {}), dict):
            call = {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _thoughts_said(message: Message) -> Message:
    """Thoughts and text beside a call as one text: there is a template that takes either, not both."""
    thought, content = message.get("reasoning_content"), message["content"]
    if not (has_calls(message) and thought and isinstance(content, str) and content):
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**rest, "content": f"{thought}\n\n{content}"}


# ---------------------------------------------------------------- order and roles


def without_empty(messages: Messages) -> Messages:
    """Without assistants that say, think and call nothing."""
    return [m for m in messages if m.get("role") != "assistant" or not _says_nothing(m)]


def _says_nothing(message: Message) -> bool:
    content = message["content"]
    is_empty = not content.strip() if isinstance(content, str) else not content
    return is_empty and not has_calls(message) and not message.get("reasoning_content")


def system_first(messages: Messages) -> Messages:
    """All that systems say, in one message at the beginning."""
    said = [message for message in messages if message.get("role") == "system"]
    if not said:
        return messages
    rest = [message for message in messages if message.get("role") != "system"]
    return [*joined(said), *rest]


def system_in_user(messages: Messages) -> Messages:
    """All that systems say, before the words of the first user."""
    first, *rest = system_first(messages) or [{}]
    if first.get("role") != "system":
        return messages
    return prefixed(rest, {**first, "role": "user"})


def prefixed(messages: Messages, message: Message) -> Messages:
    """A user's `message` before what the first user says."""
    at = next((i for i, each in enumerate(messages) if each.get("role") == "user"), None)
    if at is None:
        return [message, *messages]
    return [*messages[:at], as_one([message, messages[at]]), *messages[at + 1 :]]


def joined(messages: Messages) -> Messages:
    """Neighbours of one role as one message, a blank line between their texts. A call ends a message."""
    made: list[Messages] = []
    for message in messages:
        last = made[-1][-1] if made else {}
        is_same = last.get("role") == message.get("role") and message.get("role") != "tool"
        if is_same and not has_calls(last):
            made[-1].append(message)
        else:
            made.append([message])
    return [as_one(neighbours) for neighbours in made]


def as_one(messages: Messages) -> Message:
    """One message with all that these say; keys of later ones win."""
    if len(messages) == 1:
        return messages[0]
    one: Message = {}
    for message in messages:
        one |= message
    thoughts = [message["reasoning_content"] for message in messages if message.get("reasoning_content")]
    if thoughts:
        one["reasoning_content"] = "\n\n".join(thoughts)
    contents = [message["content"] for message in messages if message["content"]]
    if all(isinstance(content, str) for content in contents):
        return {**one, "content": "\n\n".join(contents)}
    return {**one, "content": [part for content in contents for part in _parts(content)]}


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
