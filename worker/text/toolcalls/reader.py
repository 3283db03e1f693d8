"""Text that comes in pieces, and parsers over it that are generators: they yield where they need more of it.

No decision is made before all the text that it depends on is there, so how the text was cut makes no difference.
What has been taken since `hold` may turn out to be text after all: it is kept until a call begins, or `release` gives
it out. The text is never read twice, whatever the model wrote.
"""

from collections.abc import Generator, Sequence
from typing import Literal, TypeVar

from worker.text.holdback import overlap
from worker.text.toolcalls.json_prefix import JsonPrefix

Kind = Literal["text", "reasoning", "call", "arguments", "end"]
"""`call`: one begins, and the text is its name; `arguments`: a piece of its JSON; `end`: it is whole."""
Piece = tuple[Kind, str]

T = TypeVar("T")
Step = Generator[None, None, T]
"""A part of a parser, which gives a `T` when it is through."""

SPACE = " \t\r\n"
MAX_NAME = 256  # characters of the name of a tool, or of its parameter


class Ended(Exception):
    """The text is over in the middle of something."""


class NotACall(Exception):
    """What looked like a call is none, or goes wrong from here on."""


class Reader:
    """One stream of text. `text[at:]` is what has not been taken yet."""

    def __init__(self, *, trims: bool) -> None:
        """`trims`: white space before a call is no text, so that at the end of a text is kept back."""
        self.text = ""
        self.at = 0
        self.is_over = False
        self.pieces: list[Piece] = []
        self._trims = trims
        self.in_call = False  # one has begun and is not whole
        self.follows_call = False  # nothing has been given out since a call
        self._held: int | None = None
        self._space = ""
        self._waits: tuple[Kind, str] | None = None  # for marks that begin with one of these characters

    # ------------------------------------------------------------ in and out

    def add(self, text: str) -> None:
        cut = self.at if self._held is None else self._held
        self.text = self.text[cut:] + text
        self.at -= cut
        if self._held is not None:
            self._held = 0

    def passes(self, text: str) -> Kind | None:
        """What `text` is where that is sure without a look at what came before: nearly always within an answer.

        No mark begins in it or is beginning before it, and no white space has to be kept back.
        """
        if self._waits is None or not text:
            return None
        kind, begins = self._waits
        for first in begins:
            if first in text:
                return None
        if self.follows_call or (kind == "text" and self._trims and (self._space or text[-1].isspace())):
            return None
        return kind

    def take(self) -> list[Piece]:
        """The pieces that are certain."""
        pieces, self.pieces = self.pieces, []
        return pieces

    def say(self, kind: Kind, text: str) -> None:
        """Give out a piece; of white space at the end of a text it is not known yet whether it is one."""
        if kind != "arguments" and text.strip():
            self.follows_call = False
        if kind == "text" and self._trims:
            text = self._space + text
            body = text.rstrip()
            text, self._space = body, text[len(body) :]
        elif kind == "reasoning":
            self.settle()
        if text:
            self.pieces.append((kind, text))

    def settle(self) -> None:
        """White space that was kept back is text."""
        if self._space:
            self.pieces.append(("text", self._space))
            self._space = ""

    def trim(self) -> None:
        """White space that was kept back stands between two calls."""
        self._space = ""

    def hold(self, at: int | None = None) -> None:
        """What is taken from here on (or from `at` on) may be no text."""
        self._held = self.at if at is None else at

    def drop(self) -> None:
        """What was held belongs to a mark."""
        self._held = None

    def release(self) -> None:
        """What was held is text; so is the rest of a call that went wrong."""
        self.in_call = False
        if self._held is not None:
            held, self._held = self.text[self._held : self.at], None
            self.say("text", held)

    def finish(self) -> None:
        """The text is over. What was held is text, unless it belongs to a call that is cut off."""
        if self._held is not None:
            self.at = len(self.text)
            if not self.in_call:
                self.release()
        self.settle()

    def begin(self, name: str) -> None:
        """A call: its markup is no text, nor is the white space before it."""
        self._held, self._space = None, ""
        self.in_call = True
        self.pieces.append(("call", name))

    def end(self) -> None:
        """The call is whole; what follows may belong to its markup, or be a call too."""
        self.pieces.append(("end", ""))
        self.in_call, self.follows_call = False, True
        if self._held is None:
            self.hold()

    @property
    def held(self) -> str:
        return "" if self._held is None else self.text[self._held : self.at]

    # ------------------------------------------------------------ steps

    def more(self) -> Step[None]:
        if self.is_over:
            raise Ended
        yield

    def char(self) -> Step[str]:
        """The next character, which is not taken."""
        while self.at >= len(self.text):
            yield from self.more()
        return self.text[self.at]

    def peek(self, count: int) -> Step[str]:
        """The next characters, which are not taken; fewer where the text ends."""
        while len(self.text) - self.at < count and not self.is_over:
            yield
        return self.text[self.at : self.at + count]

    def spaces(self, chars: str = SPACE) -> Step[None]:
        """Take white space, if there is any."""
        while True:
            while self.at < len(self.text):
                if self.text[self.at] not in chars:
                    return
                self.at += 1
            if self.is_over:
                return
            yield

    def literal(self, mark: str) -> Step[bool]:
        """Take `mark` if that is what follows."""
        while True:
            have = self.text[self.at : self.at + len(mark)]
            if have == mark:
                self.at += len(mark)
                return True
            if self.is_over or not mark.startswith(have):
                return False
            yield

    def one_of(self, marks: Sequence[str]) -> Step[str]:
        """Take the one of `marks` that follows; "" = none does."""
        for mark in marks:
            if (yield from self.literal(mark)):
                return mark
        return ""

    def expect(self, *marks: str) -> Step[str]:
        """Take the one of `marks` that has to follow."""
        if mark := (yield from self.one_of(marks)):
            return mark
        if any(mark.startswith(self.text[self.at :]) for mark in marks):
            self.at = len(self.text)
            raise Ended
        raise NotACall

    def close(self, mark: str) -> Step[None]:
        """Take what ends the markup of a call that is whole; where the text ends it may be missing."""
        try:
            yield from self.spaces()
            yield from self.expect(mark)
        except Ended:
            self.drop()
            raise
        self.hold()

    def upto(self, marks: Sequence[str], kind: Kind, *, holds: bool = False) -> Step[str]:
        """Take what comes before the first of `marks`, giving it out, and that mark, which may be held."""
        begins = "".join({mark[0] for mark in marks})
        while True:
            if found := self._find(marks):
                at, mark = found
                self.say(kind, self.text[self.at : at])
                self.at = at + len(mark)
                if holds:
                    self.hold(at)
                return mark
            keep = 0
            if not self.is_over:
                for mark in marks:
                    keep = max(keep, overlap(self.text, mark))
            sure = max(self.at, len(self.text) - keep)  # what was taken may end like a mark
            if sure > self.at:
                self.say(kind, self.text[self.at : sure])
                self.at = sure
            if self.is_over:
                raise Ended
            if kind != "arguments" and not keep and self._held is None:
                self._waits = kind, begins
            yield
            self._waits = None

    def before(self, *marks: str) -> Step[str]:
        """Take what comes before the first of `marks`, and that mark; what came before is the result."""
        while not (found := self._find(marks)):
            if self.is_over:
                self.at = len(self.text)
            yield from self.more()
        at, mark = found
        text = self.text[self.at : at]
        self.at = at + len(mark)
        return text

    def word(self, stops: str) -> Step[str]:
        """Take what comes before one of the characters `stops`."""
        found = ""
        while (yield from self.char()) not in stops:
            found += self.text[self.at]
            self.at += 1
            if len(found) > MAX_NAME:
                raise NotACall
        return found

    def json(self, kind: Kind | None = None) -> Step[str]:
        """Take one JSON value; with `kind` it is given out as it comes, else it is the result."""
        prefix, found = JsonPrefix(), []
        while True:
            end = prefix.feed(self.text, self.at)
            taken, self.at = self.text[self.at : end], end
            if kind is None:
                found.append(taken)
            else:
                self.say(kind, taken)
            if prefix.is_done:
                return "".join(found)
            if self.at < len(self.text):
                raise NotACall
            yield from self.more()

    def _find(self, marks: Sequence[str]) -> tuple[int, str] | None:
        """The first of `marks` in what has not been taken."""
        found = None
        for mark in marks:
            at = self.text.find(mark, self.at)
            if at >= 0 and (found is None or at < found[0]):
                found = at, mark
        return found
