"""Lines of JSON with a question and an answer under any names, as chats."""

import json

from worker.lab.dataset.form import Drop, Kit, Made, Plan, Unit, chat


async def plan(kit: Kit) -> Plan:
    """One unit a line; one that is broken, or has not both, is dropped."""
    keys = (kit.inputs["user_key"], kit.inputs["assistant_key"])
    units: list[Unit] = []
    dropped: list[Drop] = []
    for number, line in enumerate(kit.inputs["input_jsonl"].split("\n"), 1):
        if not line.strip():
            continue
        where = f"line {number}"
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            dropped.append(Drop(where, "is not JSON"))
            continue
        if not isinstance(found, dict):
            dropped.append(Drop(where, "is no JSON object"))
            continue
        texts = [_text(found.get(key)) for key in keys]
        missing = [key for key, text in zip(keys, texts, strict=True) if not text]
        if missing:
            dropped.append(Drop(where, f"has no text under {missing[0]!r}"))
        else:
            units.append(Unit(where, texts))
    return Plan(units, dropped)


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return ""
    return str(value).strip() if isinstance(value, str | int | float) else ""


async def make(unit: Unit, kit: Kit) -> Made:
    question, answer = unit.data
    return Made([chat(("user", question), ("assistant", answer))])
