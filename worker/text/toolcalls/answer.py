"""The text of an answer taken apart: thinking, text, calls of tools. One machine for all formats; see `reader`."""

from worker.text.reasoning import ReasoningFormat, Start
from worker.text.toolcalls.arguments import Tools
from worker.text.toolcalls.form import Format
from worker.text.toolcalls.harmony import Channels
from worker.text.toolcalls.reader import Ended, NotACall, Piece, Reader, Step

BREAKS = "\r\n"


class AnswerParser:
    """One stream. `feed` gives the pieces that are certain, `flush` the rest once the text is over.

    `form` and `tools`: what calls look like, None = there are none; `thinking`: likewise its marks. The line breaks
    that templates put right after a mark of thinking belong to the mark.
    """

    def __init__(
        self, form: Format | None, tools: Tools, thinking: ReasoningFormat | None, start: Start
    ) -> None:
        self.in_reasoning = start.thinking is True and thinking is not None
        self._form = form
        self._tools = tools
        self._thinking = thinking
        self._reader = Reader(trims=form is not None)
        self.is_plain = False  # from here on everything is text, and `feed` need not be asked
        if thinking is not None and thinking.is_harmony:
            self._steps = Channels(self._reader, tools, self._now_in_reasoning).answer(start)
        else:
            self._steps = self._answer(start)
        self._advance()

    def feed(self, text: str) -> list[Piece]:
        if self.is_plain:
            return [("text", text)]
        if (kind := self._reader.passes(text)) is not None:
            return [(kind, text)]
        self._reader.add(text)
        self._advance()
        return self._reader.take()

    def flush(self) -> list[Piece]:
        """The end of the text: what was held back is delivered as what it now is."""
        self._reader.is_over = True
        self._advance()
        return self._reader.take()

    def _advance(self) -> None:
        next(self._steps, None)

    def _now_in_reasoning(self, value: bool) -> None:
        self.in_reasoning = value

    def _answer(self, start: Start) -> Step[None]:
        reader = self._reader
        try:
            if self._thinking is None:
                pass
            elif start.thinking:
                yield from self._thought(self._thinking, is_fresh=start.is_fresh)
            elif start.thinking is None:
                yield from self._perhaps_thought(self._thinking)
            elif start.is_fresh:
                yield from reader.spaces(BREAKS)
            yield from self._body()
        except Ended:
            reader.finish()

    def _body(self) -> Step[None]:
        """All but the first thought."""
        reader, form, thinking = self._reader, self._form, self._thinking
        marks = list(form.begins) if form is not None else []
        if thinking is not None and thinking.anywhere:
            marks += [thinking.open, thinking.close]
        if not marks and (form is None or not form.bare):
            self.is_plain = True
            reader.say("text", reader.text[reader.at :])
            return
        is_first = True
        while True:
            if form is not None and form.bare and is_first:
                yield from self._bare_call(form)
            is_first = False
            mark = yield from reader.upto(marks or [_NEVER], "text", holds=True)
            if thinking is not None and mark == thinking.open:
                reader.drop()
                yield from self._thought(thinking, is_fresh=True)
                is_first = True
            elif thinking is not None and mark == thinking.close:
                reader.drop()
            else:
                assert form is not None
                yield from self._calls(form, mark)

    def _bare_call(self, form: Format) -> Step[None]:
        """Calls without marks are the whole answer."""
        self._reader.hold()
        yield from self._reader.spaces()
        if (yield from self._reader.char()) == form.lead[0]:
            yield from self._calls(form, "")
        else:
            self._reader.release()

    def _calls(self, form: Format, mark: str) -> Step[None]:
        """What begins with a mark of calls: calls, or text that looks like some."""
        reader = self._reader
        try:
            yield from form.call(reader, mark, self._tools)
            reader.drop()
        except NotACall:
            reader.release()
        if reader.follows_call:
            reader.trim()
            yield from reader.spaces()
            if self._thinking is not None:
                yield from self._perhaps_thought(self._thinking)

    def _perhaps_thought(self, thinking: ReasoningFormat) -> Step[None]:
        """The model may open a block here."""
        reader = self._reader
        reader.hold()
        yield from reader.spaces()
        if (yield from reader.literal(thinking.open)):
            reader.drop()
            yield from self._thought(thinking, is_fresh=True)
        else:
            reader.release()

    def _thought(self, thinking: ReasoningFormat, *, is_fresh: bool) -> Step[None]:
        reader = self._reader
        self.in_reasoning = True
        if is_fresh and thinking.has_name:
            yield from self._name(thinking)
        if is_fresh:
            yield from reader.spaces(BREAKS)
        yield from reader.upto((thinking.close,), "reasoning")
        self.in_reasoning = False
        yield from reader.spaces(BREAKS)

    def _name(self, thinking: ReasoningFormat) -> Step[None]:
        """Take the word that names what is thought, and no more of it."""
        reader = self._reader
        while (char := (yield from reader.char())).isalpha():
            reader.at += 1
        if char == "\n":
            reader.at += 1


_NEVER = "\0\0 no mark"
