"""Rows of a data set of the hub, by the REST interface of its data set viewer: pages of 100, until there are enough."""

import re
from typing import Any

from shared.errors import ErrorCode, refuse
from worker.lab.dataset.form import Drop, Kit, Made, Plan, Row, Unit, chat

PAGE = 100
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


async def plan(kit: Kit) -> Plan:
    """One unit a page. Raises `Refused`: invalid_request for what is not there, hub where it cannot be asked."""
    inputs = kit.inputs
    if not _ID.fullmatch(inputs["hf_id"]):
        raise _bad("hf_id", f"{inputs['hf_id'][:80]!r} is no data set; write ORG/NAME")
    if not inputs["label_column"]:
        if inputs["label_filter"]:
            raise _bad("label_column", "is missing: label_filter needs it")
        if inputs["output_format"] == "prompt_completion":
            raise _bad("label_column", "is missing: the completion comes from it")
    config = inputs["config"] or await _first_config(kit)
    place = {"dataset": inputs["hf_id"], "config": config, "split": inputs["split"]}
    first = await kit.fetch("/rows", {**place, "offset": 0, "length": 1})
    total, columns = first.get("num_rows_total"), [_name(each) for each in first.get("features") or []]
    if not isinstance(total, int):
        raise refuse(ErrorCode.HUB, f"the viewer does not say how many rows {inputs['hf_id']} has")
    for field in ("text_column", "label_column"):
        if inputs[field] and inputs[field] not in columns:
            raise _bad(field, f"{inputs[field]!r} is no column; there is {', '.join(columns) or 'none'}")
    units = [
        Unit(f"rows {offset} to {min(offset + PAGE, total) - 1}", {**place, "offset": offset, "length": PAGE})
        for offset in range(0, total, PAGE)
    ]
    return Plan(units, limit=inputs["max_rows"])


async def _first_config(kit: Kit) -> str:
    found = await kit.fetch("/splits", {"dataset": kit.inputs["hf_id"]})
    splits = [each for each in found.get("splits") or [] if isinstance(each, dict)]
    wanted = kit.inputs["split"]
    for each in splits:
        if each.get("split") == wanted:
            return str(each.get("config", ""))
    names = ", ".join(dict.fromkeys(str(each.get("split")) for each in splits)) or "none"
    raise _bad("split", f"{wanted!r} is not there; there is {names}")


async def make(unit: Unit, kit: Kit) -> Made:
    found = await kit.fetch("/rows", unit.data)
    rows: list[Row] = []
    dropped: list[Drop] = []
    for each in found.get("rows") or []:
        where = f"row {each.get('row_idx')}"
        made = _row(each.get("row") or {}, set(each.get("truncated_cells") or ()), kit)
        if isinstance(made, str):
            dropped.append(Drop(where, made))
        elif made is not None:
            rows.append(made)
    return Made(rows, dropped)


def _row(cells: dict[str, Any], truncated: set[str], kit: Kit) -> Row | str | None:
    """The row, why there is none, or None where it was not asked for."""
    inputs = kit.inputs
    label_column = inputs["label_column"]
    label = "" if not label_column else _plain(cells.get(label_column))
    if inputs["label_filter"] and label != inputs["label_filter"]:
        return None
    text = cells.get(inputs["text_column"])
    if not isinstance(text, str):
        return "has no text"
    if inputs["text_column"] in truncated:
        return "the viewer gives only the beginning of the text"
    if len(text) < inputs["min_chars"]:
        return f"is shorter than min_chars {inputs['min_chars']}"
    match inputs["output_format"]:
        case "messages_user_only":
            return chat(("user", text))
        case "prompt_completion":
            if not label or label_column in truncated:
                return "has no whole completion"
            return {"prompt": text, "completion": label}
        case _:
            return {"text": text}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _name(feature: Any) -> str:
    return str(feature.get("name", "")) if isinstance(feature, dict) else ""


def _bad(field: str, problem: str) -> Exception:
    return refuse(
        ErrorCode.INVALID_REQUEST,
        f"template hf_dataset_import: inputs.{field} {problem}",
        param=f"inputs.{field}",
    )
