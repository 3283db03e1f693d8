"""Chats of several turns: the model answers, and writes what the user would say next."""

from worker.lab.dataset import texts
from worker.lab.dataset.form import Kit, Made, Message, Plan, Unit, chat

_USER = """\
You play the user of an assistant{who}. You are shown a conversation. Write what the user says next: one short message \
that follows from the last answer, in the user's own words. Answer with that message alone."""


async def plan(kit: Kit) -> Plan:
    """One unit a first message."""
    return Plan([Unit(f"line {piece.line}", piece.text) for piece in texts.lines(kit.inputs["seeds"])])


async def make(unit: Unit, kit: Kit) -> Made:
    """Of an odd number of turns the last is the user's, and it gets an answer too."""
    persona, user = kit.inputs["persona"], kit.inputs["user_persona"]
    system = _USER.format(who=f", {user}" if user else "")
    turns = [("user", unit.data)]
    while True:
        said: list[Message] = [{"role": role, "content": text} for role, text in turns]
        turns.append(("assistant", (await kit.ask(said, persona)).whole()))
        if len(turns) >= kit.inputs["turns"]:
            return Made([chat(*turns, system=persona)])
        shown = "\n\n".join(f"{role.capitalize()}: {text}" for role, text in turns)
        turns.append(("user", (await kit.ask(shown, system)).whole()))
