"""Questions that a passage answers, and the answers; what the passage does not say is no row."""

from worker.lab.dataset import texts
from worker.lab.dataset.form import Drop, Dropped, Kit, Made, Plan, Row, Unit, chat

NOTHING = "NOT IN THE PASSAGE"
_QUESTIONS = """\
Passage:

{passage}

Write {count} different questions that this passage answers. Each must make sense to somebody who has only the \
passage. One on each line, numbered, and nothing else."""
_ANSWER = f"""\
Answer the question by the passage alone, in one to three sentences. If the passage does not say it, answer exactly \
{NOTHING}."""


async def plan(kit: Kit) -> Plan:
    """One unit a passage: paragraphs together until they are long enough; a shorter rest is dropped."""
    units: list[Unit] = []
    held, begin = "", 0
    least = kit.inputs["min_chunk_chars"]
    for piece in texts.paragraphs(kit.inputs["documents"]):
        begin = begin if held else piece.line
        held = f"{held}\n\n{piece.text}" if held else piece.text
        if len(held) >= least:
            units.append(Unit(f"line {begin}", held))
            held = ""
    rest = [Drop(f"line {begin}", f"is shorter than min_chunk_chars {least}")] if held else []
    return Plan(units, rest)


async def make(unit: Unit, kit: Kit) -> Made:
    passage, count = unit.data, kit.inputs["questions_per_chunk"]
    asked = await kit.ask(_QUESTIONS.format(passage=passage, count=count))
    questions = texts.listed(asked.text)
    if not asked.is_whole:
        questions = questions[:-1]
    if not questions:
        raise Dropped("the model wrote no questions")
    rows: list[Row] = []
    dropped: list[Drop] = []
    for question in questions[:count]:
        shown = f"{passage}\n\n{question}"
        try:
            answer = (await kit.ask(shown, _ANSWER)).whole()
        except Dropped as reason:
            dropped.append(Drop(unit.where, str(reason)))
            continue
        if NOTHING.casefold() in answer.casefold():
            dropped.append(Drop(unit.where, "the passage does not answer the question"))
        else:
            rows.append(chat(("user", shown), ("assistant", answer)))
    return Made(rows, dropped)
