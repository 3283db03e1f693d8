"""Splits thinking from answer in a stream of decoded text.

Where the stream begins is read from the rendered prompt: if the template left a think block open there,
the model is thinking already; if it closed one, it is not, and a tag in the text is only text. Otherwise
the model may open a block itself, as the first thing it writes.
"""

from typing import Literal, NamedTuple

from worker.text.holdback import overlap

Kind = Literal["text", "reasoning"]
Piece = tuple[Kind, str]


class ReasoningFormat(NamedTuple):
    """The marks around thinking text."""

    open: str
    close: str


FORMATS = (ReasoningFormat("<think>", "</think>"),)


def detect_format(template: str) -> ReasoningFormat | None:
    """The reasoning format that a chat template speaks of, or None."""
    return next((f for f in FORMATS if f.open in template or f.close in template), None)


def starts_open(rendered: str, form: ReasoningFormat) -> bool | None:
    """True: the prompt ends inside a think block; False: after one that it closed itself; None: neither.

    Only the end of the prompt counts: a block in an earlier turn says nothing about this one.
    """
    tail = rendered.rstrip()
    if tail.endswith(form.open):
        return True
    return False if tail.endswith(form.close) else None


class ReasoningSplitter:
    """One stream. `feed` gives the pieces that are certain; a possible beginning of a mark is held back.

    The line breaks that templates put right after a mark belong to the mark, not to the text.
    """

    def __init__(self, form: ReasoningFormat, begins: bool | None) -> None:
        self._form = form
        self._state: Literal["maybe", "reasoning", "text"] = (
            "maybe" if begins is None else "reasoning" if begins else "text"
        )
        self._held = ""
        self._after_mark = begins is not None

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held and self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        """The end of the text: what was held back is delivered as what it now is."""
        held, self._held = self._held, ""
        kind: Kind = "reasoning" if self._state == "reasoning" else "text"
        return [(kind, held)] if held else []

    def _advance(self, pieces: list[Piece]) -> bool:
        """One decision on the held text; False when more text is needed."""
        if self._state == "maybe":
            return self._decide()
        if self._after_mark:
            self._held = self._held.lstrip("\r\n")
            if not self._held:
                return False
            self._after_mark = False
        if self._state == "text":
            pieces.append(("text", self._held))
            self._held = ""
            return False
        close = self._form.close
        at = self._held.find(close)
        if at >= 0:
            if at:
                pieces.append(("reasoning", self._held[:at]))
            self._held = self._held[at + len(close) :]
            self._state, self._after_mark = "text", True
            return True
        keep = overlap(self._held, close)
        if len(self._held) > keep:
            pieces.append(("reasoning", self._held[: len(self._held) - keep]))
            self._held = self._held[len(self._held) - keep :]
        return False

    def _decide(self) -> bool:
        """At the start of the stream: does the model open a think block?"""
        bare = self._held.lstrip()
        if bare.startswith(self._form.open):
            self._held = bare[len(self._form.open) :]
            self._state, self._after_mark = "reasoning", True
            return True
        if self._form.open.startswith(bare):  # white space only, or a beginning of the mark
            return False
        self._state = "text"
        return True
