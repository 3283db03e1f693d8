"""What a format of calls is: how calls are read, and how a grammar makes a model write them."""

from collections.abc import Callable
from typing import NamedTuple

from worker.text.toolcalls.arguments import Schema, Tools
from worker.text.toolcalls.lark import Rules
from worker.text.toolcalls.reader import Ended, Reader, Step


class Format(NamedTuple):
    """One format. `call` reads one call or several from the mark on (which is taken already) and raises `NotACall`.

    `write` gives the Lark of a call of one tool: all that comes after `lead`, with which every call begins; where
    `opening` is set, many calls stand between it and `closing` with `comma` between them, after one `lead`.
    """

    name: str
    marks: tuple[str, ...]  # that a tokenizer may have as tokens outside of text
    begins: tuple[str, ...]  # marks at which a call may begin
    call: Callable[[Reader, str, Tools], Step[None]]
    write: Callable[[Rules, str, Schema], str]
    lead: str
    opening: tuple[str, ...] = ()  # marks and texts
    closing: tuple[str, ...] = ()
    comma: str = ""
    between: str = "\n"  # two calls that each have their own lead, perhaps
    bare: bool = False  # a lead that is no mark: calls are the whole answer, and begin where it begins
    ends: tuple[str, ...] = ()  # marks that end a turn


def begun(reader: Reader, name: str, tools: Tools) -> Schema:
    """Begin a call and give its schema."""
    reader.begin(name)
    return tools[name]


def listed(reader: Reader, tools: Tools, call: Callable[[Reader, Tools], Step[bool]]) -> Step[bool]:
    """Calls with commas between them, up to the `]`; what is no call is text. Gives whether the last one was one."""
    while True:
        yield from reader.spaces()
        is_call = yield from call(reader, tools)
        if not is_call:
            reader.hold()
        try:
            yield from reader.spaces()
            mark = yield from reader.expect(",", "]")
        except Ended:
            if is_call:
                reader.drop()
            raise
        if not is_call:
            reader.release()
        if mark == "]":
            return is_call
