"""For each text a prompt that could have led to it and a draft to be revised; the text itself is the answer."""

from worker.lab.dataset import texts
from worker.lab.dataset.form import Dropped, Kit, Made, Plan, Unit, chat

_INFER = """\
Here is a finished text:

{text}

Write the request of somebody for whom this text would be the perfect answer. Do not quote it.{hints} Answer with the \
request alone."""
_DRAFT = """\
Here is a finished text:

{text}

Write a plain, unpolished first draft of it with the same content.{locks} Answer with the draft alone."""


async def plan(kit: Kit) -> Plan:
    """One unit a text."""
    pieces = texts.sections(kit.inputs["target_text"])
    return Plan([Unit(f"line {piece.line}", piece.text) for piece in pieces])


async def make(unit: Unit, kit: Kit) -> Made:
    inputs, text = kit.inputs, unit.data
    keep, avoid = texts.names(inputs["preserve"]), texts.names(inputs["avoid"])
    locks = [word for word in keep if word in text]
    hints = [
        f" It asks for the style {inputs['style']}." if inputs["style"] else "",
        f" It asks for the tone {inputs['tone']}." if inputs["tone"] else "",
        f" It does not mention: {', '.join(avoid)}." if avoid else "",
    ]
    prompt = (await kit.ask(_INFER.format(text=text, hints="".join(hints)))).whole()
    if named := next((word for word in avoid if word.casefold() in prompt.casefold()), ""):
        raise Dropped(f"the prompt mentions {named!r}")
    asked = f" Keep these as they are: {', '.join(locks)}." if locks else ""
    draft = (await kit.ask(_DRAFT.format(text=text, locks=asked))).whole()
    metadata = {
        "style": inputs["style"],
        "tone": inputs["tone"],
        "avoid": avoid,
        "locks": [{"text": word, "kept": word in draft} for word in locks],
    }
    return Made([chat(("user", f"{prompt}\n\n{draft}"), ("assistant", text), metadata=metadata)])
