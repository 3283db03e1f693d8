"""DeepSeek's calls: name and JSON between marks (V3.1), or `function`, name and a fenced block (V3, R1)."""

from worker.text.toolcalls.arguments import Schema, Tools
from worker.text.toolcalls.form import Format
from worker.text.toolcalls.lark import Rules, object_of
from worker.text.toolcalls.reader import NotACall, Reader, Step

_ALL, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_ONE, _ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"


def _call(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    if mark == _ALL:
        yield from reader.spaces()
        yield from reader.expect(_ONE)
    yield from reader.spaces()
    name = (yield from reader.word("<\n")).strip()
    yield from reader.expect(_SEPARATOR)
    is_fenced = name == "function" and (yield from reader.peek(1)) not in ("{", "")
    if is_fenced:
        name = (yield from reader.word("\n`{")).strip()
        yield from reader.spaces()
        yield from reader.expect("```json", "```")
    if name not in tools:
        raise NotACall
    yield from reader.spaces()
    if (yield from reader.char()) != "{":
        raise NotACall
    reader.begin(name)
    yield from reader.json("arguments")
    reader.end()
    if is_fenced:
        yield from reader.close("```")
    yield from reader.close(_ONE_END)
    yield from reader.close(_ALL_END)


def _write(rules: Rules, name: str, schema: Schema) -> str:
    marks = f"{rules.mark(_ONE)} {rules.text(name)} {rules.mark(_SEPARATOR)}"
    return f"{marks} {rules.json(object_of(schema))} {rules.mark(_ONE_END)}"


def _write_fenced(rules: Rules, name: str, schema: Schema) -> str:
    marks = f'{rules.mark(_ONE)} "function" {rules.mark(_SEPARATOR)}'
    head = rules.text(f"{name}\n```json\n")
    return f'{marks} {head} {rules.json(object_of(schema))} "\\n```" {rules.mark(_ONE_END)}'


DEEPSEEK = Format(
    name="deepseek",
    marks=(_ALL, _ALL_END, _ONE, _ONE_END, _SEPARATOR),
    begins=(_ALL, _ONE),
    call=_call,
    write=_write,
    lead=_ALL,
    opening=("",),
    closing=(_ALL_END,),
)
DEEPSEEK_FENCED = DEEPSEEK._replace(name="deepseek_fenced", write=_write_fenced, comma="\n")
