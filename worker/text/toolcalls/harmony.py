"""GPT-OSS's format: an answer is messages of channels, `analysis` (thinking), `commentary` (calls, text), `final`.

A message is `<|start|>assistant`, a header with its channel and perhaps `to=functions.NAME`, `<|message|>`, its text
and an end mark. The prompt ends where the first header begins. https://github.com/openai/harmony, docs/format.md
"""

import re
from collections.abc import Callable

from worker.text.reasoning import HARMONY_MARKS, Start
from worker.text.toolcalls.arguments import Schema, Tools
from worker.text.toolcalls.form import Format
from worker.text.toolcalls.lark import Rules, object_of
from worker.text.toolcalls.reader import Ended, NotACall, Reader, Step

_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
_BEGINS = ("<|channel|>", "<|constrain|>", "<|message|>", "to=")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_MAX_HEADER = 1000  # characters


class Channels:
    """One answer. `in_reasoning` is told whenever thinking begins or ends."""

    def __init__(self, reader: Reader, tools: Tools, in_reasoning: Callable[[bool], None]) -> None:
        self._reader = reader
        self._tools = tools
        self._in_reasoning = in_reasoning

    def answer(self, start: Start) -> Step[None]:
        reader = self._reader
        header = start.header
        try:
            while True:
                if header is None:
                    header = yield from self._header()
                yield from self._message(header)
                header = None
        except Ended:
            if "<|" in reader.held and "to=" not in reader.held:
                reader.drop()
            reader.finish()

    def _header(self) -> Step[str]:
        """What stands before the text of a message. Text that comes without a header is text."""
        reader = self._reader
        while True:
            reader.hold()
            yield from reader.spaces()
            if (yield from reader.literal("<|start|>")):
                yield from reader.literal("assistant")
                yield from reader.spaces()
            header = ""
            if first := (yield from reader.one_of(_BEGINS)):
                header = yield from self._rest_of_header(first)
            if header:
                return header
            if "to=" in reader.held or not first:
                reader.release()
                yield from self._text()
            reader.drop()

    def _rest_of_header(self, header: str) -> Step[str]:
        """The header with the mark behind it; "" = it is none."""
        reader = self._reader
        while not header.endswith("<|message|>"):
            char = yield from reader.char()
            if char == "<":
                char = yield from reader.one_of(HARMONY_MARKS)
                if char in ("", *_ENDS):
                    return ""
            elif re.match(r"[\w.\-=\s]", char):
                reader.at += 1
            else:
                return ""
            header += char
            if len(header) > _MAX_HEADER:
                return ""
        return header

    def _text(self) -> Step[None]:
        yield from self._reader.upto(_ENDS, "text")

    def _message(self, header: str) -> Step[None]:
        reader = self._reader
        recipient = _RECIPIENT.search(header)
        if recipient is not None and self._tools:
            yield from self._call(recipient[1])
            return
        reader.drop()
        if "analysis" in header:
            self._in_reasoning(True)
            yield from reader.upto(_ENDS, "reasoning")
            self._in_reasoning(False)
        else:
            yield from self._text()

    def _call(self, name: str) -> Step[None]:
        reader = self._reader
        try:
            yield from reader.spaces()
            if name not in self._tools or (yield from reader.char()) != "{":
                raise NotACall
            reader.begin(name)
            yield from reader.json("arguments")
        except NotACall:
            reader.release()
            yield from self._text()
            return
        reader.end()
        reader.drop()
        yield from reader.spaces()
        if not (yield from reader.one_of(_ENDS)):
            yield from self._text()


def _call(reader: Reader, mark: str, tools: Tools) -> Step[None]:
    """Never asked: calls are messages, which `Channels` reads."""
    yield from reader.expect(mark)


def _write(rules: Rules, name: str, schema: Schema) -> str:
    head = (
        f'"commentary to=functions.{name} " {rules.mark("<|constrain|>")} "json" {rules.mark("<|message|>")}'
    )
    return f"{head} {rules.json(object_of(schema))}"


HARMONY = Format(
    name="harmony",
    marks=HARMONY_MARKS,
    begins=(),
    call=_call,
    write=_write,
    lead="<|channel|>",
    ends=("<|call|>", "<|return|>"),
)
