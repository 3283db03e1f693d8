"""A bound on thinking: after so many tokens of it the mark that closes it comes, whatever the model would say.

Where the answer has a grammar, a character that is not whole is finished before.

llguidance's own `max_tokens` is not used: it forbids grammars to be merged, and would need one where there is none.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from worker.text.detokenizer import Detokenizer
from worker.text.reasoning import ReasoningFormat
from worker.text.tokenizer import TextTokenizer
from worker.text.toolcalls.answer import AnswerParser

Ids = frozenset[int]


class Budget:
    """Of one row. `allowed`: the ids that may come next where that is decided here; None: any."""

    def __init__(
        self, limit: int, parser: AnswerParser, detokenizer: Detokenizer, closing: Sequence[Ids]
    ) -> None:
        """`closing`: what is let through, token by token, once the budget is used up."""
        self.allowed: Ids | None = None
        self._left = limit
        self._parser = parser
        self._detokenizer = detokenizer
        self._closing = closing
        self._steps: deque[Ids] = deque()
        self._decide()

    def accept(self, token: int) -> None:
        self._left -= self._parser.in_reasoning
        if self._steps:
            self._steps.popleft()
        if text := self._detokenizer.feed(token):
            self._parser.feed(text)
        self._decide()

    def _decide(self) -> None:
        if not self._steps and self._left <= 0 and self._parser.in_reasoning:
            self._steps.extend(self._closing)
        self.allowed = self._steps[0] if self._steps else None


def closing(form: ReasoningFormat, tokenizer: TextTokenizer, *, has_tools: bool) -> list[Ids]:
    """The ids that end a thought, one after the other.

    Harmony's next message must not be another thought: it is the answer, or a call where there are tools.
    """
    encode = tokenizer.encode_rendered
    if not form.is_harmony:
        return _each(encode(form.close))
    head = "<|end|><|start|>assistant<|channel|>"
    if not has_tools:
        return _each(encode(f"{head}final<|message|>"))
    return [*_each(encode(head)), frozenset(encode(name)[0] for name in ("final", "commentary"))]


def _each(ids: Iterable[int]) -> list[Ids]:
    return [frozenset((token,)) for token in ids]
