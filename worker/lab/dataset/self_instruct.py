"""New instructions like given ones (after Wang et al. 2022). Their answers are left empty, for somebody to write."""

from worker.lab.dataset import texts
from worker.lab.dataset.form import Drop, Dropped, Kit, Made, Plan, Unit, chat

_PROMPT = """\
Here is an instruction for an assistant:

{seed}

Write {count} other instructions of the same kind that differ in subject and wording. One on each line, numbered, \
and nothing else."""


async def plan(kit: Kit) -> Plan:
    """One unit an instruction."""
    return Plan([Unit(f"line {piece.line}", piece.text) for piece in texts.lines(kit.inputs["seeds"])])


async def make(unit: Unit, kit: Kit) -> Made:
    count = kit.inputs["variants_per_seed"]
    answer = await kit.ask(_PROMPT.format(seed=unit.data, count=count))
    found = texts.listed(answer.text)
    if not answer.is_whole:
        found = found[:-1]  # the last one was cut
    if not found:
        raise Dropped("the model wrote no list")
    missing = count - len(found)
    return Made(
        [chat(("user", text), ("assistant", "")) for text in found[:count]],
        [Drop(unit.where, "the model wrote fewer instructions than asked for")] if missing > 0 else [],
    )
