"""Prompts with a better and a worse answer, from a CSV table (RFC 4180) with the header prompt,chosen,rejected."""

import csv
import io

from shared.errors import ErrorCode, refuse
from shared.lab_templates import MOST_TEXT
from worker.lab.dataset.form import Drop, Kit, Made, Plan, Unit

COLUMNS = ("prompt", "chosen", "rejected")


async def plan(kit: Kit) -> Plan:
    """One unit a row of the table; one with an empty cell is dropped. Raises `Refused` (invalid_request)."""
    csv.field_size_limit(MOST_TEXT)
    reader = csv.reader(io.StringIO(kit.inputs["csv_text"].removeprefix("\ufeff"), newline=""), strict=True)
    units: list[Unit] = []
    dropped: list[Drop] = []
    places: list[int] = []
    begin = 1
    try:
        for row in reader:
            line, begin = begin, reader.line_num + 1
            if not any(cell.strip() for cell in row):
                continue
            if not places:
                places = _header(row, line)
                width = len(row)
            elif len(row) != width:
                dropped.append(Drop(f"line {line}", f"has {len(row)} cells, and the header {width}"))
            elif empty := [name for name, at in zip(COLUMNS, places, strict=True) if not row[at].strip()]:
                dropped.append(Drop(f"line {line}", f"has an empty {empty[0]}"))
            else:
                units.append(Unit(f"line {line}", [row[at] for at in places]))
    except csv.Error as error:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"inputs.csv_text: line {reader.line_num}: {error}",
            param="inputs.csv_text",
        ) from None
    return Plan(units, dropped)


def _header(row: list[str], line: int) -> list[int]:
    names = [cell.strip().casefold() for cell in row]
    if missing := [name for name in COLUMNS if name not in names]:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"inputs.csv_text: line {line} is the header and has no {', '.join(missing)}; it has to name "
            f"{', '.join(COLUMNS)}",
            param="inputs.csv_text",
        )
    return [names.index(name) for name in COLUMNS]


async def make(unit: Unit, kit: Kit) -> Made:
    return Made([dict(zip(COLUMNS, unit.data, strict=True))])
