"""Calls with values of their own notation: Gemma 4's `call:NAME{key:value}` and Python's `[f(a=1)]` (Llama, LFM2)."""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from worker.text.toolcalls.arguments import Schema, Tools, converted, member, quoted, quoting, resolve
from worker.text.toolcalls.form import Format, listed
from worker.text.toolcalls.lark import Literals, Rules, Unwritable, object_of, pattern_of
from worker.text.toolcalls.reader import SPACE, Ended, NotACall, Reader, Step

_MAX_DEPTH = 64


class _Notation(NamedTuple):
    """How strings begin, how they are read on from there, and what a bare word stands for, as JSON."""

    quotes: tuple[str, ...]
    string: Callable[[Reader, str], Step[None]]
    word: Callable[[str, Schema, Schema], str]
    lists: str  # what opens one
    has_bare_keys: bool


def _read(reader: Reader, notation: _Notation, schema: Schema, root: Schema, depth: int = 0) -> Step[None]:
    """One value, given out as JSON as it comes."""
    if depth > _MAX_DEPTH:
        raise NotACall
    yield from reader.spaces()
    if quote := (yield from reader.one_of(notation.quotes)):
        yield from _string(reader, notation, quote)
        return
    char = yield from reader.char()
    if char == "{":
        reader.at += 1
        reader.say("arguments", "{")
        yield from _members(reader, notation, schema, root, depth)
    elif char in notation.lists:
        reader.at += 1
        reader.say("arguments", "[")
        yield from _items(reader, notation, schema, root, depth, "]" if char == "[" else ")")
    else:
        reader.hold()
        raw = yield from _bare(reader)
        word = notation.word(raw, schema, root)
        reader.drop()
        reader.say("arguments", word)


def _bare(reader: Reader) -> Step[str]:
    parts = []
    while (yield from reader.char()) not in ",}])":
        parts.append(reader.text[reader.at])
        reader.at += 1
    return "".join(parts).strip()


def _string(reader: Reader, notation: _Notation, quote: str) -> Step[None]:
    reader.say("arguments", '"')
    yield from notation.string(reader, quote)
    reader.say("arguments", '"')


def _items(
    reader: Reader, notation: _Notation, schema: Schema, root: Schema, depth: int, end: str
) -> Step[None]:
    inner = resolve(schema.get("items"), root)
    separator = ""
    while (yield from _goes_on(reader, end, separator)):
        reader.say("arguments", separator)
        separator = ", "
        yield from _read(reader, notation, inner, root, depth + 1)
    reader.say("arguments", "]")


def _goes_on(reader: Reader, end: str, separator: str) -> Step[bool]:
    """Take the comma before a further element, or the `end` of them (a comma before that is fine)."""
    reader.hold()
    yield from reader.spaces()
    is_end = yield from reader.literal(end)
    if not is_end and separator:
        yield from reader.expect(",")
        yield from reader.spaces()
        is_end = yield from reader.literal(end)
    reader.drop()
    return not is_end


def _members(reader: Reader, notation: _Notation, schema: Schema, root: Schema, depth: int) -> Step[None]:
    """The members of an object and its end; the `{` has been given out."""
    separator = ""
    while (yield from _goes_on(reader, "}", separator)):
        key = yield from _key(reader, notation)
        reader.say("arguments", f"{separator}{quoted(key)}: ")
        separator = ", "
        yield from _read(reader, notation, member(schema, key, root), root, depth + 1)
    reader.say("arguments", "}")


def _key(reader: Reader, notation: _Notation) -> Step[str]:
    reader.hold()
    if quote := (yield from reader.one_of(notation.quotes)):
        key = yield from reader.before(quote)
        yield from reader.spaces()
    elif notation.has_bare_keys:
        key = (yield from reader.word(":,{}[]<\n")).strip()
    else:
        raise NotACall
    yield from reader.expect(":")
    reader.drop()
    return key


# ---------------------------------------------------------------- Gemma 4

_QUOTE = '<|"|>'


def _gemma_string(reader: Reader, quote: str) -> Step[None]:
    yield from quoting(reader, reader.upto((quote,), "arguments"))


_GEMMA = _Notation((_QUOTE,), _gemma_string, converted, "[", True)


def _gemma(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    yield from reader.spaces()
    yield from reader.expect("call:")
    name = yield from reader.word("{<" + SPACE)
    if name not in tools:
        raise NotACall
    yield from reader.expect("{")
    reader.begin(name)
    reader.say("arguments", "{")
    yield from _members(reader, _GEMMA, tools[name], tools[name], 0)
    reader.end()
    yield from reader.close("<tool_call|>")


def _write_gemma(rules: Rules, name: str, schema: Schema) -> str:
    quote = rules.mark(_QUOTE)

    def string(inner: Schema) -> str:
        return f"{quote} {rules.upto(_QUOTE, pattern_of(inner))}"

    def literal(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote} {rules.text(value)} {quote}"
        return rules.text(json.dumps(value))

    def key(text: str) -> str:
        if not text or re.search(r"[\s:,{}\[\]<]", text):
            return f'{quote} {rules.text(text)} {quote} ":"'
        return rules.text(f"{text}:")

    literals = Literals(rules, string, literal, key, ",")
    schema = object_of(schema)
    return f'{rules.text(f"call:{name}{{")} {literals.members(schema, schema, key)} "}}" {rules.mark("<tool_call|>")}'


GEMMA = Format(
    name="gemma",
    marks=("<|tool_call>", "<tool_call|>", _QUOTE),
    begins=("<|tool_call>",),
    call=_gemma,
    write=_write_gemma,
    lead="<|tool_call>",
    between="",
    ends=("<|tool_response>",),
)

# ---------------------------------------------------------------- Python

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"'": "'", "\n": "", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000"}
_HEX = {"x": 2, "u": 4, "U": 8}


def _python_string(reader: Reader, quote: str) -> Step[None]:
    """On one line, with Python's escapes as JSON has them; one that neither knows stands for itself."""
    while True:
        char = yield from reader.char()
        if char == "\n":
            raise NotACall
        if char == "\\":
            yield from _python_escape(reader)
            continue
        reader.at += 1
        if char == quote:
            return
        reader.say("arguments", quoted(char)[1:-1])


def _python_escape(reader: Reader) -> Step[None]:
    two = yield from reader.peek(2)
    if len(two) < 2:
        raise Ended
    char = two[1]
    if char in _HEX:
        size = 2 + _HEX[char]
        digits = (yield from reader.peek(size))[2:]
        if len(digits) < size - 2:
            raise Ended
        if not re.fullmatch("[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
            raise NotACall
        reader.at += size
        code = int(digits, 16)
        escape = json.dumps(chr(code))[1:-1] if code > 0xFFFF else f"\\u{code:04x}"
    else:
        reader.at += 2
        escape = two if char in '"\\/bfnrt' else _ESCAPES.get(char, f"\\\\{quoted(char)[1:-1]}")
    reader.say("arguments", escape)


def _python_word(raw: str, schema: Schema, root: Schema) -> str:
    """A constant as JSON; anything else would be a program."""
    raw = _PYTHON_WORDS.get(raw, raw)
    if raw in ("true", "false", "null"):
        return raw
    number = raw.replace("_", "")
    if re.fullmatch(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", number):
        return number
    if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?", number) and "inf" not in repr(float(number)):
        return repr(float(number))
    raise NotACall


_PYTHON = _Notation(('"', "'"), _python_string, _python_word, "[(", False)


def _pythonic(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """`[f(a=1), g(b="x")]`, between marks or as the whole answer."""
    yield from reader.spaces()
    yield from reader.expect("[")
    is_known = yield from listed(reader, tools, _python_call)
    if mark and is_known:
        yield from reader.close("<|tool_call_end|>")


def _python_call(reader: Reader, tools: Tools) -> Step[bool]:
    """False: it calls nothing that is known, and has been given out as text."""
    name = yield from reader.word("()[]{},;:=\"'" + SPACE)
    if not re.fullmatch(r"[^\W\d][\w.\-]*", name) or not (yield from reader.literal("(")):
        raise NotACall
    if name not in tools:
        yield from _skipped(reader)
        return False
    reader.begin(name)
    reader.say("arguments", "{")
    schema = tools[name]
    separator = ""
    while (yield from _goes_on(reader, ")", separator)):
        reader.hold()
        key = yield from reader.word("=(),[]{}\"'" + SPACE)
        yield from reader.spaces()
        yield from reader.expect("=")
        reader.drop()
        reader.say("arguments", f"{separator}{quoted(key)}: ")
        separator = ", "
        yield from _read(reader, _PYTHON, member(schema, key, schema), schema)
    reader.say("arguments", "}")
    reader.end()
    return True


def _skipped(reader: Reader) -> Step[None]:
    """The arguments of an unknown function and its `)`, as text."""
    reader.release()
    depth, quote = 1, ""
    while depth:
        char = yield from reader.char()
        if char == "\\" and quote:
            char = yield from reader.peek(2)
        elif quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
        reader.at += len(char)
        reader.say("text", char)


def _write_pythonic(rules: Rules, name: str, schema: Schema) -> str:
    def string(inner: Schema) -> str:
        limits: Schema = {key: inner[key] for key in ("pattern", "minLength", "maxLength") if key in inner}
        return rules.json({"type": "string", **limits})

    def literal(value: Any) -> str:
        return rules.text(quoted(value) if isinstance(value, str) else repr(value))

    def argument(key: str) -> str:
        if not key.isidentifier():
            raise Unwritable(f"the parameter {quoted(key)} is no Python name")
        return rules.text(f"{key}=")

    literals = Literals(rules, string, literal, lambda key: rules.text(f"{quoted(key)}: "), ", ")
    schema = object_of(schema)
    return f'{rules.text(f"{name}(")} {literals.members(schema, schema, argument)} ")"'


PYTHONIC = Format(
    name="pythonic",
    marks=(),
    begins=(),
    call=_pythonic,
    write=_write_pythonic,
    lead="[",
    closing=("]",),
    opening=("",),
    comma=", ",
    bare=True,
)
LFM2 = PYTHONIC._replace(
    name="lfm2",
    marks=("<|tool_call_start|>", "<|tool_call_end|>"),
    begins=("<|tool_call_start|>",),
    lead="<|tool_call_start|>",
    opening=("[",),
    closing=("]", "<|tool_call_end|>"),
    bare=False,
)
