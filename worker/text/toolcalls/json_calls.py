"""Calls that are JSON objects: in `<tool_call>` tags, bare (Llama 3), in a list (Mistral), or after a name."""

import json
import re

from worker.text.toolcalls.arguments import Schema, Tools, quoted
from worker.text.toolcalls.form import Format, listed
from worker.text.toolcalls.json_prefix import JsonPrefix
from worker.text.toolcalls.lark import Rules, object_of
from worker.text.toolcalls.reader import SPACE, Ended, NotACall, Reader, Step

_ARGUMENTS = ("arguments", "parameters")
_KNOWN = frozenset({*_ARGUMENTS, "name", "function", "type", "id", "index"})
_MAX_DEPTH = 3


class _Call:
    """What is known so far of a call whose object is being read."""

    def __init__(self, tools: Tools, *, is_strict: bool) -> None:
        self.tools = tools
        self.is_strict = is_strict  # a key that calls do not have makes it another object
        self.name = ""
        self.waiting: str | None = None  # arguments that came before the name
        self.is_whole = False  # the arguments are


class _Unknown(Exception):
    """A call of something that is no tool of the request."""


def object_call(reader: Reader, tools: Tools, *, is_strict: bool = False) -> Step[bool]:
    """Read a call from its `{` on. False: it calls nothing that is known, and has been given out as text.

    An object that is no call raises `NotACall`, and so do arguments that go wrong. What goes wrong after them does
    not matter: the call is whole, and the text from there on is still held.
    """
    if (yield from reader.char()) != "{":
        raise NotACall
    start = len(reader.held)
    call = _Call(tools, is_strict=is_strict)
    is_sound = False
    try:
        yield from _members(reader, call, 0)
        is_sound = True
    except _Unknown:
        prefix = JsonPrefix()
        prefix.feed(reader.held[start:])
        reader.release()
        yield from _rest_of(reader, prefix)
        return False
    except NotACall:
        if not call.is_whole:
            raise
    except Ended:
        if call.is_whole:
            reader.end()
            reader.drop()
        raise
    if not call.name:
        raise NotACall
    if not call.is_whole:
        _whole(reader, call, "{}" if call.waiting is None else call.waiting)
    reader.end()
    if is_sound:
        reader.hold()
    return True


def _rest_of(reader: Reader, prefix: JsonPrefix) -> Step[None]:
    while not prefix.is_done:
        end = prefix.feed(reader.text, reader.at)
        reader.say("text", reader.text[reader.at : end])
        reader.at = end
        if prefix.is_done or reader.at < len(reader.text):
            return
        yield from reader.more()


def _members(reader: Reader, call: _Call, depth: int) -> Step[None]:
    yield from reader.expect("{")
    is_first = True
    while True:
        yield from reader.spaces()
        if (yield from reader.char()) == "}":
            reader.at += 1
            return
        if not is_first:
            yield from reader.expect(",")
            yield from reader.spaces()
        is_first = False
        if (yield from reader.char()) != '"':
            raise NotACall
        key = json.loads((yield from reader.json()))
        if call.is_strict and not call.is_whole and key not in _KNOWN:
            raise NotACall
        yield from reader.spaces()
        yield from reader.expect(":")
        yield from reader.spaces()
        yield from _member(reader, call, key, depth)


def _member(reader: Reader, call: _Call, key: str, depth: int) -> Step[None]:
    if call.is_whole:
        yield from reader.json()
    elif key == "name":
        if (yield from reader.char()) != '"':
            raise NotACall
        call.name = json.loads((yield from reader.json()))
        if call.name not in call.tools:
            raise _Unknown
        if call.waiting is not None:
            _whole(reader, call, call.waiting)
    elif key in _ARGUMENTS:
        if call.name:
            yield from _arguments(reader, call)
        else:
            call.waiting = _unwrapped((yield from reader.json()))
    elif key == "function" and depth < _MAX_DEPTH and (yield from reader.char()) == "{":
        yield from _members(reader, call, depth + 1)
    else:
        yield from reader.json()


def _whole(reader: Reader, call: _Call, arguments: str) -> None:
    """The call with all its arguments; what follows is held."""
    reader.begin(call.name)
    reader.say("arguments", arguments)
    reader.hold()
    call.is_whole = True


def _unwrapped(raw: str) -> str:
    """Arguments that are whole, as an object: they may be null, or a string that holds one."""
    if raw == "null":
        return "{}"
    if raw.startswith('"'):
        raw = _sound(json.loads(raw).strip()) or "{}"
    prefix = JsonPrefix()
    if not raw.startswith("{") or prefix.feed(raw) < len(raw) or not prefix.is_done:
        raise NotACall
    return raw


def _arguments(reader: Reader, call: _Call) -> Step[None]:
    """Arguments whose name is known: an object is passed on as it comes."""
    first = yield from reader.char()
    if first == "{":
        reader.begin(call.name)
        yield from reader.json("arguments")
        reader.hold()
        call.is_whole = True
    elif first == '"':
        yield from _string(reader, call)
    else:
        _whole(reader, call, _unwrapped((yield from reader.json())))


def _string(reader: Reader, call: _Call) -> Step[None]:
    """Arguments in a string: what it stands for is passed on as it comes."""
    reader.at += 1
    prefix, has_begun = JsonPrefix(), False
    while (unit := (yield from _unit(reader))) != '"':
        char = unit if len(unit) == 1 else _sound(json.loads(f'"{unit}"'))
        if not has_begun and char == "{":
            reader.begin(call.name)
            has_begun = True
        if has_begun and not prefix.is_done:
            if prefix.feed(char) < len(char):
                raise NotACall
            reader.say("arguments", char)
        elif char.strip():  # before an object, or after it
            raise NotACall
        reader.at += len(unit)
    if not has_begun:
        _whole(reader, call, "{}")
    elif not prefix.is_done:
        raise NotACall
    reader.at += 1
    reader.hold()
    call.is_whole = True


def _unit(reader: Reader) -> Step[str]:
    """The next character of a JSON string as it is written, not taken; two escapes may make one character."""
    char = yield from reader.char()
    if char < " ":
        raise NotACall
    if char != "\\":
        return char
    unit = yield from reader.peek(2)
    if unit[1:] == "u":
        unit = yield from reader.peek(6)
        if re.fullmatch(r"\\u[dD][89abAB]..", unit):
            pair = yield from reader.peek(12)
            unit = pair if re.fullmatch(r"\\u[dD][c-fC-F]..", pair[6:]) else unit
    if len(unit) < 2 or (unit[1] == "u" and len(unit) < 6):
        raise Ended
    if not re.fullmatch(r'\\["\\/bfnrt]|(\\u[0-9a-fA-F]{4})+', unit):
        raise NotACall
    return unit


def _sound(text: str) -> str:
    """Halves of surrogate pairs have no bytes; within a JSON string their escapes stand for them."""
    return re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)


def _wrapped(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """`<tool_call>{…}</tool_call>`"""
    yield from reader.spaces()
    if (yield from object_call(reader, tools)):
        yield from reader.close("</tool_call>")


def _head(name: str, key: str) -> str:
    return f'{{"name": {quoted(name)}, "{key}": '


def _write_wrapped(rules: Rules, name: str, schema: Schema) -> str:
    head = rules.text("\n" + _head(name, "arguments"))
    return f'{head} {rules.json(object_of(schema))} "}}\\n" {rules.mark("</tool_call>")}'


JSON_TAGS = Format(
    name="json_tags",
    marks=("<tool_call>", "</tool_call>"),
    begins=("<tool_call>",),
    call=_wrapped,
    write=_write_wrapped,
    lead="<tool_call>",
)


def _bare(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """`{"name": …, "parameters": …}`, several with `;` between them, perhaps behind `<|python_tag|>`."""
    yield from reader.spaces()
    while (yield from object_call(reader, tools, is_strict=True)):
        yield from reader.close(";")
        yield from reader.spaces()


def _write_bare(rules: Rules, name: str, schema: Schema) -> str:
    tail = rules.text(_head(name, "parameters").removeprefix(_LEAD))
    return f'{tail} {rules.json(object_of(schema))} "}}"'


_LEAD = '{"name": "'

LLAMA_JSON = Format(
    name="llama_json",
    marks=("<|python_tag|>",),
    begins=("<|python_tag|>",),
    call=_bare,
    write=_write_bare,
    lead=_LEAD,
    between="; ",
    bare=True,
    ends=("<|eom_id|>",),
)


def _mistral(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """A list of objects; or `NAME[ARGS]{…}`, perhaps with `[CALL_ID]…` between the two."""
    yield from reader.spaces()
    if (yield from reader.literal("[")):
        yield from listed(reader, tools, object_call)
        return
    name = yield from reader.word("[{" + SPACE)
    if name not in tools:
        raise NotACall
    if (yield from reader.literal("[CALL_ID]")):
        yield from reader.word("[")
    yield from reader.literal("[ARGS]")
    yield from reader.spaces()
    if (yield from reader.char()) != "{":
        raise NotACall
    reader.begin(name)
    yield from reader.json("arguments")
    reader.end()


def _write_element(rules: Rules, name: str, schema: Schema) -> str:
    call_id = rules.rule('", \\"id\\": \\"" /[a-zA-Z0-9]{9}/ "\\""')
    return f'{rules.text(_head(name, "arguments"))} {rules.json(object_of(schema))} {call_id}? "}}"'


def _write_after_name(rules: Rules, name: str, schema: Schema) -> str:
    return f"{rules.text(name)} {rules.mark('[ARGS]')} {rules.json(object_of(schema))}"


MISTRAL = Format(
    name="mistral",
    marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    begins=("[TOOL_CALLS]",),
    call=_mistral,
    write=_write_element,
    lead="[TOOL_CALLS]",
    opening=("[",),
    closing=("]",),
    comma=", ",
)
MISTRAL_ARGS = MISTRAL._replace(
    name="mistral_args", write=_write_after_name, opening=(), closing=(), between=""
)
