"""How models mark their thinking, and where an answer begins with respect to it.

That is read from the rendered prompt: if the template left a think block open there, the model is thinking already;
if it closed one, it is not, and a mark in the text is only text. Otherwise the model may open a block itself, as the
first thing it writes.
"""

from typing import Any, NamedTuple

TAIL = 4096
"""Characters at the end of a prompt that are looked at."""


class ReasoningFormat(NamedTuple):
    """The marks around thinking text. `anywhere`: they cannot be text, so that a block may begin at any place.

    `has_name`: the first line after `open` names what follows and is no thinking.
    """

    open: str
    close: str
    anywhere: bool = False
    has_name: bool = False
    is_harmony: bool = False  # thinking, text and calls are messages of channels

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as tokens outside of text."""
        return HARMONY_MARKS if self.is_harmony else (self.open, self.close)


HARMONY_MARKS = (
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)
HARMONY = ReasoningFormat("<|channel|>analysis<|message|>", "<|end|>", is_harmony=True)
FORMATS = (
    HARMONY,
    ReasoningFormat("<|channel>", "<channel|>", anywhere=True, has_name=True),
    ReasoningFormat("[THINK]", "[/THINK]", anywhere=True),
    ReasoningFormat("<think>", "</think>"),
)


class Start(NamedTuple):
    """Where an answer begins: in a thought (True), in text (False), or where the model may open one (None).

    `is_fresh`: right after a mark, to which line breaks belong.
    """

    thinking: bool | None
    is_fresh: bool = True
    header: str | None = ""  # harmony: the header of the message that goes on; None: a message begins


def detect_format(template: str) -> ReasoningFormat | None:
    """The reasoning format that a chat template speaks of, or None."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    return next((f for f in FORMATS[1:] if f.open in template or f.close in template), None)


def start_of(rendered: str, form: ReasoningFormat, final: dict[str, Any] | None = None) -> Start:
    """Where the answer to a rendered prompt begins. `final`: the message of the assistant that it goes on with.

    Only the end of the prompt counts: a block in an earlier turn says nothing about this one.
    """
    if form.is_harmony:
        return _start_of_message(rendered[-TAIL:] if final is None else rendered)
    if final is not None:
        said = final.get("content")
        if isinstance(said, str) and said.strip():
            return Start(said.rfind(form.open) > said.rfind(form.close), is_fresh=False)
        if final.get("reasoning_content"):
            return Start(rendered.rfind(form.open) > rendered.rfind(form.close), is_fresh=False)
    tail = rendered[-TAIL:].rstrip()
    if form.has_name and tail.rpartition(form.open)[1] and form.close not in tail.rpartition(form.open)[2]:
        name = tail.rpartition(form.open)[2]
        if name.isalpha():
            return Start(True)
    if tail.endswith(form.open):
        return Start(True)
    return Start(False) if tail.endswith(form.close) else Start(None)


def _start_of_message(rendered: str) -> Start:
    """Harmony: within a message whose header the prompt has, or at the beginning of one."""
    _, mark, header = rendered.rpartition("<|start|>")
    header, body, _ = header.partition("<|message|>")
    if not mark or not body or "<|end|>" in rendered.rpartition("<|message|>")[2]:
        return Start(None, header=None)
    header = header.removeprefix("assistant")
    return Start("analysis" in header, is_fresh=False, header=header)
