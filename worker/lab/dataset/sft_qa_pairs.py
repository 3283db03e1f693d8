"""Questions and answers that are written down: `Q: …` and `A: …`, each as long as it is."""

import re

from worker.lab.dataset.form import Drop, Kit, Made, Plan, Unit, chat

_MARK = re.compile(r"^\s*(?:\*\*)?(q|a|question|answer)\s*[:.]\s*(?:\*\*)?\s*(.*)$", re.IGNORECASE)


class _Pair:
    """One question, the line where it stands, and its answer; `answer` None: there is none yet."""

    def __init__(self, line: int, text: str) -> None:
        self.line = line
        self.question: list[str] = [text]
        self.answer: list[str] | None = None

    def go_on(self, text: str) -> None:
        """A line without a mark belongs to what came last."""
        (self.question if self.answer is None else self.answer).append(text)

    def end(self) -> Unit | Drop:
        where = f"line {self.line}"
        asked, said = ("\n".join(part or []).strip() for part in (self.question, self.answer))
        if not asked:
            return Drop(where, "the question is empty")
        return Unit(where, [asked, said]) if said else Drop(where, "the question has no answer")


async def plan(kit: Kit) -> Plan:
    """One unit a pair; a question without an answer is dropped, and so is what stands before the first question."""
    pairs: list[_Pair] = []
    dropped: list[Drop] = []
    for number, text in enumerate(kit.inputs["pairs_text"].splitlines(), 1):
        found = _MARK.match(text)
        if found is not None and found[1].lower().startswith("q"):
            pairs.append(_Pair(number, found[2]))
        elif pairs and found is not None and pairs[-1].answer is None:
            pairs[-1].answer = [found[2]]
        elif pairs:
            pairs[-1].go_on(found[2] if found is not None else text)
        elif text.strip():
            reason = "stands before the first Q:" if found is None else "an answer without a question"
            dropped.append(Drop(f"line {number}", reason))
    ended = [pair.end() for pair in pairs]
    return Plan(
        [one for one in ended if isinstance(one, Unit)],
        [*dropped, *(one for one in ended if isinstance(one, Drop))],
    )


async def make(unit: Unit, kit: Kit) -> Made:
    question, answer = unit.data
    return Made([chat(("user", question), ("assistant", answer))])
