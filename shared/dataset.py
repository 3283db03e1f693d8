"""Data sets as folders of `train.jsonl` and perhaps `valid.jsonl`: which format, how many rows, what is wrong where.

Formats, one a data set: `messages` (chats, with `tools` beside them where calls are made), `prompt` + `completion`,
`prompt` + `chosen` + `rejected` (preferences), `text`. Nothing of a model is needed to say so.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import ErrorCode, refuse
from shared.files import open_regular

Format = Literal["messages", "completion", "preference", "text"]

FIELDS: dict[Format, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "messages": ("messages",),
    "text": ("text",),
}
"""What a row of each format has; a row is of the first one that it has all fields of."""

MAX_FAULTS = 20
HELD_OUT = 10
"""Without `valid.jsonl` one row of so many is held out, the last ones; fewer rows than that are all trained on."""

_decode = msgspec.json.Decoder().decode


class Fault(msgspec.Struct, frozen=True):
    """A line, counted from 1, that cannot be used, and why."""

    file: str
    line: int
    reason: str


class Row(msgspec.Struct, frozen=True):
    """One row and where it stands."""

    file: str
    line: int
    data: dict[str, Any]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder holds. `format` "": no row could be told. `held_out`: rows of `train` that would be taken as
    `valid`, because there is no such file. `empty`: lines without anything in them, which are passed over.
    """

    format: Format | Literal[""] = ""
    train: int = 0
    valid: int = 0
    held_out: int = 0
    has_tools: bool = False
    empty: int = 0
    faults: list[Fault] = []  # the first `MAX_FAULTS`
    fault_count: int = 0
    error: str = ""  # why it cannot be trained on; "" = it can


class DataSet(msgspec.Struct, frozen=True):
    """The rows of a data set without faults. `held_out`: how many of the file `train.jsonl` are in `valid`."""

    format: Format
    train: list[Row]
    valid: list[Row]
    held_out: int = 0


def probe(folder: str | os.PathLike[str]) -> Report:
    """Look through a data set. What is wrong with it is in the report; nothing is raised."""
    return _read(Path(folder), None)


def read(folder: str | os.PathLike[str], *, split: bool = True) -> DataSet:
    """All rows. Raises `Refused` (invalid_request) that names the first fault and counts the others.

    `split`: hold rows out where there is no `valid.jsonl`.
    """
    rows: dict[str, list[Row]] = {}
    report = _read(Path(folder), rows)
    if report.error or not report.format:
        raise refuse(ErrorCode.INVALID_REQUEST, report.error, param="data")
    train, valid = rows["train"], rows.get("valid", [])
    if not split or not report.held_out:
        return DataSet(report.format, train, valid)
    cut = len(train) - report.held_out
    return DataSet(report.format, train[:cut], train[cut:], report.held_out)


def read_rows(path: Path) -> list[Row]:
    """The rows of one file of any format. Raises `Refused` (invalid_request), as `read`."""
    found, rows = _Findings(), list[Row]()
    try:
        found.look_through(path, rows)
    except OSError as error:
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"{path}: cannot be read ({error.strerror})", param="data"
        ) from None
    fault = (
        found.verdict(path.parent, len(rows))
        if found.faults
        else ""
        if rows
        else f"{path}: there are no rows"
    )
    if fault:
        raise refuse(ErrorCode.INVALID_REQUEST, fault, param="data")
    return rows


def _read(folder: Path, into: dict[str, list[Row]] | None) -> Report:
    found = _Findings()
    counts: dict[str, int] = {}
    for name in ("train", "valid"):
        path = folder / f"{name}.jsonl"
        kept: list[Row] | None = None if into is None else []
        try:
            counts[name] = found.look_through(path, kept)
        except FileNotFoundError:
            if name == "train":
                return Report(
                    error=f"{folder}: there is no train.jsonl; a data set is a folder with one"
                    if folder.is_dir()
                    else f"{folder}: there is no such folder"
                )
            continue
        except OSError as error:
            return Report(error=f"{path}: cannot be read ({error.strerror})")
        if into is not None and kept is not None:
            into[name] = kept
    train = counts["train"]
    return Report(
        format=found.format,
        train=train,
        valid=counts.get("valid", 0),
        held_out=0 if "valid" in counts else train // HELD_OUT,
        has_tools=found.has_tools,
        empty=found.empty,
        faults=found.faults,
        fault_count=found.count,
        error=found.verdict(folder, train),
    )


class _Findings:
    """What came up while files were looked through."""

    def __init__(self) -> None:
        self.format: Format | Literal[""] = ""
        self.first = ""  # where the format was told from
        self.has_tools = False
        self.empty = self.count = 0
        self.faults: list[Fault] = []

    def look_through(self, path: Path, kept: list[Row] | None) -> int:
        """-> good rows of the file. Raises OSError."""
        good = 0
        for line, data in self._rows(path):
            kind = format_of(data)
            reason = fault_of(data, kind) if kind else _unknown(data)
            if not reason and self.format and kind != self.format:
                reason = f"is {kind}, and the data set is {self.format} since {self.first}"
            if reason:
                self._fault(path, line, reason)
                continue
            assert kind is not None
            if not self.format:
                self.format, self.first = kind, f"{path.name} line {line}"
            self.has_tools = self.has_tools or bool(data.get("tools"))
            good += 1
            if kept is not None:
                kept.append(Row(path.name, line, data))
        return good

    def _rows(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        with open_regular(path) as file:
            for line, raw in enumerate(file, 1):
                text = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
                if not text.strip():
                    self.empty += 1
                    continue
                try:
                    data = _decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    self._fault(path, line, f"is not JSON: {error or 'nested too deep'}")
                    continue
                if isinstance(data, dict):
                    yield line, data
                else:
                    self._fault(path, line, "is no JSON object")

    def _fault(self, path: Path, line: int, reason: str) -> None:
        self.count += 1
        if len(self.faults) < MAX_FAULTS:
            self.faults.append(Fault(path.name, line, reason))

    def verdict(self, folder: Path, train: int) -> str:
        """Why the data set cannot be trained on."""
        if self.faults:
            first = self.faults[0]
            lines = ", ".join(f"{fault.file} {fault.line}" for fault in self.faults[1:])
            more = (
                f"; so are {self.count - 1} other lines ({lines}{', …' if self.count > MAX_FAULTS else ''})"
            )
            return (
                f"{folder / first.file}: line {first.line} {first.reason}{more if self.count > 1 else ''}; "
                "mend or remove them"
            )
        return "" if train else f"{folder / 'train.jsonl'}: there are no rows"


def format_of(data: dict[str, Any]) -> Format | None:
    """By the fields that a row has."""
    return next((kind for kind, fields in FIELDS.items() if all(field in data for field in fields)), None)


def fault_of(data: dict[str, Any], kind: Format) -> str:
    """Why a row of this format cannot be used; "" = it can."""
    if "tools" in data and data["tools"] is not None and not isinstance(data["tools"], list):
        return "has tools that are no list"
    if kind == "messages":
        return _chat_fault(data["messages"], "messages")
    for field in FIELDS[kind]:
        value = data[field]
        if kind == "preference" and isinstance(value, list):
            if reason := _chat_fault(value, field):
                return reason
        elif not isinstance(value, str):
            return f"has a {field} that is no text"
        elif not value.strip() and field != "prompt":
            return f"has an empty {field}"
    return ""


def _chat_fault(messages: Any, field: str) -> str:
    if not isinstance(messages, list) or not messages:
        return f"has {field} that are no list of messages" if messages != [] else f"has no message in {field}"
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"has {field}[{place}] without a role"
        content = message.get("content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"has {field}[{place}] without content"
    return ""


def _unknown(data: dict[str, Any]) -> str:
    have = ", ".join(sorted(map(str, data))[:8]) or "nothing"
    return (
        f"has {have}; a row has messages, or text, or prompt and completion, or prompt, chosen and rejected"
    )
