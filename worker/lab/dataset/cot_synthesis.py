"""Questions with thinking and answer, the thinking in a block `<think>`, whatever way the model wrote it."""

import re

from worker.lab.dataset import texts
from worker.lab.dataset.form import Answer, Dropped, Kit, Made, Plan, Unit, chat

_SYSTEM = """\
Think step by step{field}. Write your thinking between <think> and </think>, then the final answer alone."""
_TAGS = re.compile(r"^\s*<(think|thinking|reasoning)>(.*?)</\1>(.*)$", re.DOTALL | re.IGNORECASE)
_CLOSED = re.compile(r"^(.*?)</(?:think|thinking|reasoning)>(.*)$", re.DOTALL | re.IGNORECASE)
_WORD = re.compile(
    r"^(.*?)^[ \t]*(?:#+[ \t]*)?(?:\*\*)?(?:final )?(?:answer|conclusion)(?:\*\*)?[ \t]*:(?:\*\*)?(.*)$",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)


async def plan(kit: Kit) -> Plan:
    """One unit a question."""
    return Plan([Unit(f"line {piece.line}", piece.text) for piece in texts.lines(kit.inputs["questions"])])


async def make(unit: Unit, kit: Kit) -> Made:
    category = kit.inputs["category"]
    answer = await kit.ask(
        unit.data, _SYSTEM.format(field=f", as an expert in {category}" if category else "")
    )
    thinking, said = parted(answer)
    row = chat(("user", unit.data), ("assistant", f"<think>\n{thinking}\n</think>\n\n{said}"))
    return Made([{**row, "metadata": {"category": category}} if category else row])


def parted(answer: Answer) -> tuple[str, str]:
    """Thinking and answer. Raises `Dropped` where one is missing."""
    text = answer.whole()
    if answer.thinking.strip():
        thinking, said = answer.thinking, text
    elif found := _TAGS.match(text):
        thinking, said = found[2], found[3]
    elif found := _CLOSED.match(text) or _WORD.match(text):
        thinking, said = found[1], found[2]
    else:
        thinking, border, said = text.rpartition("\n\n")
        if not border:
            raise Dropped("thinking and answer cannot be told apart")
    thinking, said = thinking.strip(), said.strip()
    if not thinking or not said:
        raise Dropped(f"the {'answer' if thinking else 'thinking'} is empty")
    return thinking, said
