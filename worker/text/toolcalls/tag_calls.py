"""Calls in tags with one parameter after the other: Qwen3.5 and Qwen3-Coder, MiniCPM5, GLM."""

import re
from typing import Any

from worker.text.toolcalls.arguments import Arguments, Schema, Tools, quoted
from worker.text.toolcalls.form import Format
from worker.text.toolcalls.lark import ANY, Rules, Unwritable, parameters, raw_value
from worker.text.toolcalls.reader import SPACE, NotACall, Reader, Step


def _value(reader: Reader, arguments: Arguments, name: str, *ends: str) -> Step[None]:
    """A value up to the first of `ends`."""
    if arguments.streams(name):
        yield from arguments.add_string(name, reader.upto(ends, "arguments"))
    else:
        arguments.add(name, (yield from reader.before(*ends)))


def _is_tool(name: str, tools: Tools) -> str:
    if name not in tools:
        raise NotACall
    return name


# ---------------------------------------------------------------- <function=NAME>, Qwen3.5 and Qwen3-Coder


def _function(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """`<function=NAME>`, `<parameter=KEY>` and a line each; `<tool_call>` around it may be missing."""
    if mark == "<tool_call>":
        yield from reader.spaces()
        yield from reader.expect("<function=")
    name = _is_tool((yield from reader.word(">" + SPACE)), tools)
    yield from reader.expect(">")
    yield from reader.spaces()
    follows = yield from reader.expect("<parameter=", "</function>")
    reader.begin(name)
    arguments = Arguments(reader, tools[name])
    while follows == "<parameter=":
        key = yield from reader.word(">\n")
        yield from reader.expect(">")
        yield from reader.literal("\n")
        yield from _value(reader, arguments, key, "\n</parameter>", "</parameter>")
        reader.hold()
        yield from reader.spaces()
        follows = yield from reader.expect("<parameter=", "</function>")
        reader.drop()
    arguments.close()
    if mark == "<tool_call>":
        yield from reader.close("</tool_call>")


def _write_function(rules: Rules, name: str, schema: Schema) -> str:
    def one(key: str, inner: Any) -> str:
        end = "\n</parameter>"
        value = raw_value(rules, inner, schema, lambda pattern: rules.upto(end, pattern), end)
        head = rules.text(f"<parameter={_word(key, '>')}>\n")
        return f'{head} {value} "\\n"'

    head = rules.text(f"\n<function={_word(name, '>')}>\n")
    return f'{head} {parameters(rules, schema, one)} "</function>\\n" {rules.mark("</tool_call>")}'


FUNCTION_TAGS = Format(
    name="function_tags",
    marks=("<tool_call>", "</tool_call>"),
    begins=("<tool_call>", "<function="),
    call=_function,
    write=_write_function,
    lead="<tool_call>",
)

# ---------------------------------------------------------------- <function name="…">, MiniCPM5

_CDATA = "<![CDATA["


def _named(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """`<function name="NAME">` and `<param name="KEY">…</param>` each; a value may stand in CDATA."""
    name = _is_tool((yield from reader.word('"\n<')), tools)
    yield from reader.expect('">')
    yield from reader.spaces()
    follows = yield from reader.expect('<param name="', "</function>")
    reader.begin(name)
    arguments = Arguments(reader, tools[name])
    while follows != "</function>":
        key = yield from reader.word('"\n')
        yield from reader.expect('">')
        if (yield from reader.literal(_CDATA)):
            yield from _value(reader, arguments, key, "]]>")
            reader.hold()
            yield from reader.spaces()
            yield from reader.expect("</param>")
        else:
            yield from _value(reader, arguments, key, "</param>")
            reader.hold()
        yield from reader.spaces()
        follows = yield from reader.expect('<param name="', "</function>")
        reader.drop()
    arguments.close()


def _write_named(rules: Rules, name: str, schema: Schema) -> str:
    def string(pattern: str) -> str:
        if pattern != ANY:
            return f'"{_CDATA}" {rules.upto("]]>", pattern)} "</param>"'
        return f'(/[^<&\\n]*/ "</param>" | "{_CDATA}" {rules.upto("]]>")} "</param>")'

    def one(key: str, inner: Any) -> str:
        value = raw_value(rules, inner, schema, string, "</param>")
        return rules.text(f"<param name={_attribute(key)}>") + f" {value}"

    head = rules.text(_attribute(name)[1:] + ">")
    return f'{head} {parameters(rules, schema, one)} "</function>"'


NAMED_FUNCTION = Format(
    name="named_function",
    marks=("<function", "</function>", "<param", "</param>"),
    begins=('<function name="',),
    call=_named,
    write=_write_named,
    lead='<function name="',
)

# ---------------------------------------------------------------- <arg_key>, GLM


def _keyed(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """`<tool_call>NAME`, then `<arg_key>KEY</arg_key><arg_value>…</arg_value>` each, perhaps on lines of their own."""
    yield from reader.spaces()
    name = _is_tool((yield from reader.word("<" + SPACE)), tools)
    yield from reader.spaces()
    follows = yield from reader.expect("<arg_key>", "</tool_call>")
    reader.begin(name)
    arguments = Arguments(reader, tools[name])
    while follows == "<arg_key>":
        reader.hold(reader.at - len("<arg_key>"))
        key = yield from reader.word("<\n")
        yield from reader.expect("</arg_key>")
        yield from reader.spaces()
        yield from reader.expect("<arg_value>")
        reader.drop()
        yield from _value(reader, arguments, key, "</arg_value>")
        reader.hold()
        yield from reader.spaces()
        follows = yield from reader.expect("<arg_key>", "</tool_call>")
        reader.drop()
    arguments.close()


def _write_keyed(rules: Rules, name: str, schema: Schema) -> str:
    mark, end = rules.mark, "</arg_value>"

    def one(key: str, inner: Any) -> str:
        head = f"{mark('<arg_key>')} {rules.text(_word(key, '<'))} {mark('</arg_key>')}"
        value = raw_value(rules, inner, schema, lambda pattern: rules.upto(end, pattern), end)
        return f'{head} "\\n"? {mark("<arg_value>")} {value} "\\n"?'

    return f'{rules.text(_word(name, "<"))} "\\n"? {parameters(rules, schema, one)} {mark("</tool_call>")}'


KEY_VALUE = Format(
    name="key_value",
    marks=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    begins=("<tool_call>",),
    call=_keyed,
    write=_write_keyed,
    lead="<tool_call>",
    ends=("<|observation|>",),
)


def _attribute(name: str) -> str:
    return f'"{_word(name, chr(34))}"'


def _word(name: str, stop: str) -> str:
    """A name that the format can hold; in tags nothing can be escaped."""
    if stop in name or re.search(r"\s", name):
        raise Unwritable(f"the name {quoted(name)} cannot be written in tags")
    return name
