"""From what units came to, to a data set: checked, without doubles, split, with a report. Pure but for `write`.

Two rows are the same when their texts are, apart from case, white space and punctuation beside words.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from shared.dataset import FIELDS, fault_of, format_of
from shared.errors import ErrorCode, refuse
from worker.lab.dataset.form import Drop, Made, Plan, Row
from worker.lab.dataset.working import needed

REPORT = "report.json"
SHOWN = 5
"""Places that the report names for each reason, and rows that it shows."""
_LOOSE = re.compile(r"(?<!\w)[.,;:!?\"'’“”]+|[.,;:!?\"'’“”]+(?!\w)")


class Reason(msgspec.Struct, frozen=True):
    """Why `count` units or rows are not there, and where the first of them stand."""

    reason: str
    count: int
    where: list[str]


class Lengths(msgspec.Struct, frozen=True):
    """Characters of the texts of a row."""

    shortest: int = 0
    median: int = 0
    longest: int = 0
    total: int = 0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a data set holds and what is not in it. The same for the same inputs, seed and answers.

    `job`: the id of the job that made it.
    """

    template: str
    format: str
    rows: int
    train: int
    valid: int
    units: int
    duplicates_exact: int
    duplicates_near: int
    dropped: int
    reasons: list[Reason]
    chars: Lengths
    preview: list[Row]
    inputs: dict[str, Any]
    model: str = ""
    seed: int = 0
    job: str = ""


class Result(msgspec.Struct, frozen=True):
    """The rows of both files, and the report."""

    train: list[Row]
    valid: list[Row]
    report: Report


def finish(
    plan: Plan,
    done: dict[int, Made],
    *,
    deduplicate: bool,
    template: str,
    inputs: dict[str, Any],
    **facts: Any,
) -> Result:
    """Raises `Refused` (invalid_request) where no row is left, with the reasons."""
    dropped = list(plan.dropped)
    rows: list[Row] = []
    places: list[str] = []
    count = needed(plan, done)
    for number in range(count):
        made = done[number]
        dropped += made.dropped
        rows += made.rows
        places += [plan.units[number].where] * len(made.rows)
    if plan.limit:
        rows = rows[: plan.limit]
    rows, exact, near = _checked(rows, places, dropped, deduplicate=deduplicate)
    if not rows:
        why = "; ".join(f"{one.reason} ({one.count})" for one in reasons_of(dropped)[:SHOWN])
        raise refuse(ErrorCode.INVALID_REQUEST, f"no row came of it: {why or 'the inputs hold nothing'}")
    train, valid = split(rows)
    sizes = sorted(sum(map(len, texts_of(row))) for row in rows)
    report = Report(
        template=template,
        format=format_of(rows[0]) or "",
        rows=len(rows),
        train=len(train),
        valid=len(valid),
        units=count,
        duplicates_exact=exact,
        duplicates_near=near,
        dropped=len(dropped),
        reasons=reasons_of(dropped),
        chars=Lengths(sizes[0], sizes[len(sizes) // 2], sizes[-1], sum(sizes)),
        preview=rows[:SHOWN],
        inputs={name: _shown(value) for name, value in inputs.items()},
        **facts,
    )
    return Result(train, valid, report)


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Nine tenths to train on, the rest held out; of one row both are that one."""
    cut = max(1, len(rows) * 9 // 10)
    return rows[:cut], rows[cut:] or rows[-1:]


def _checked(
    rows: list[Row], places: list[str], dropped: list[Drop], *, deduplicate: bool
) -> tuple[list[Row], int, int]:
    """-> the rows that can be trained on, each once, and how many doubles there were, exact and near."""
    kept: list[Row] = []
    seen: set[bytes] = set()
    alike: set[str] = set()
    exact = near = 0
    for row, where in zip(rows, places, strict=False):
        kind = format_of(row)
        fault = fault_of(row, kind) if kind else "is of no known format"
        if kept and not fault and kind != format_of(kept[0]):
            fault = f"is of the format {kind}, and the first one {format_of(kept[0])}"
        if fault:
            dropped.append(Drop(where, f"the row {fault}"))
            continue
        if deduplicate:
            same, like = msgspec.json.encode(row), "\n".join(map(normal, texts_of(row)))
            if same in seen:
                exact += 1
                continue
            if like in alike:
                near += 1
                continue
            seen.add(same)
            alike.add(like)
        kept.append(row)
    return kept, exact, near


def reasons_of(dropped: Iterable[Drop]) -> list[Reason]:
    """By how often they came, then by when."""
    found: dict[str, list[str]] = {}
    for one in dropped:
        found.setdefault(one.reason, []).append(one.where)
    by_count = sorted(found.items(), key=lambda item: -len(item[1]))
    return [Reason(reason, len(where), where[:SHOWN]) for reason, where in by_count]


def normal(text: str) -> str:
    """A text without what two of the same may differ in."""
    text = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(_LOOSE.sub(" ", text).split())


def texts_of(row: Row) -> Iterator[str]:
    """Every text that would be trained on."""
    for field in next((fields for fields in FIELDS.values() if all(name in row for name in fields)), ()):
        yield from _texts(row[field])


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case list():
            for each in value:
                yield from _texts(each)
        case dict():
            for name in sorted(value.keys() - {"role"}):
                yield from _texts(value[name])


def _shown(value: Any) -> Any:
    """An input for the report: of a long text the beginning."""
    if isinstance(value, str) and len(value) > 500:
        return f"{value[:500]}… ({len(value)} characters)"
    return value


def write(result: Result, folder: Path) -> None:
    """The two files and the report. Raises OSError."""
    for name, rows in (("train", result.train), ("valid", result.valid)):
        with (folder / f"{name}.jsonl").open("wb") as file:
            file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
    report = msgspec.json.format(msgspec.json.encode(result.report), indent=2)
    (folder / REPORT).write_bytes(report + b"\n")
