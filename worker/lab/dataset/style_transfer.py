"""Each paragraph of a text and how the model writes it in the style of samples."""

from worker.lab.dataset import texts
from worker.lab.dataset.form import Kit, Made, Plan, Unit

_SYSTEM = """\
You rewrite texts. Keep the meaning and every fact; take tone, rhythm and choice of words from these samples:

{samples}

Answer with the rewritten text alone."""


async def plan(kit: Kit) -> Plan:
    """One unit a paragraph."""
    return Plan(
        [Unit(f"line {piece.line}", piece.text) for piece in texts.paragraphs(kit.inputs["raw_text"])]
    )


async def make(unit: Unit, kit: Kit) -> Made:
    answer = await kit.ask(unit.data, _SYSTEM.format(samples=kit.inputs["reference_samples"].strip()))
    return Made([{"prompt": unit.data, "completion": answer.whole()}])
