"""Questions and answers that are written down: `Q: …` and `A: …`, each as long as it is."""

import re

from worker.lab.dataset.form import Drop, Kit, Made, Plan, Unit, chat

_MARK = re.compile(r"^\s*(?:\*\*)?(q|a|question|answer)\s*[:.]\s*(?:\*\*)?\s*(.*)$", re.IGNORECASE)


async def plan(kit: Kit) -> Plan:
    """One unit a pair; a question without an answer is dropped, and so is what stands before the first question."""
    units: list[Unit] = []
    dropped: list[Drop] = []
    line, question, answer = 0, None, None

    def end() -> None:
        if question is None:
            return
        asked, said = ("\n".join(part or []).strip() for part in (question, answer))
        if asked and said:
            units.append(Unit(f"line {line}", [asked, said]))
        else:
            dropped.append(
                Drop(f"line {line}", "the question has no answer" if asked else "the question is empty")
            )

    for number, text in enumerate(kit.inputs["pairs_text"].splitlines(), 1):
        found = _MARK.match(text)
        if found is None:
            held = answer if answer is not None else question
            if held is not None:
                held.append(text)
            elif text.strip():
                dropped.append(Drop(f"line {number}", "stands before the first Q:"))
        elif found[1].lower().startswith("q"):
            end()
            line, question, answer = number, [found[2]], None
        elif question is None:
            dropped.append(Drop(f"line {number}", "an answer without a question"))
        elif answer is None:
            answer = [found[2]]
        else:
            answer.append(text)
    end()
    return Plan(units, dropped)


async def make(unit: Unit, kit: Kit) -> Made:
    question, answer = unit.data
    return Made([chat(("user", question), ("assistant", answer))])
