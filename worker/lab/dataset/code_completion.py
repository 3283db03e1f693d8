"""Functions and classes of a folder's Python files, cut in two: what comes first is the prompt.

Links are not followed, and hidden folders, virtual environments and installed packages are passed over.
"""

import asyncio
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

from shared.errors import ErrorCode, refuse
from shared.files import read_regular
from worker.lab.dataset.form import Drop, Kit, Made, Plan, Unit

MIN_CHARS = 30
MOST_BYTES = 1 << 20
"""A longer file was not written by hand."""
_BEGIN = re.compile(r"^(?:@|def |async def |class )")
_PASSED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}


async def plan(kit: Kit) -> Plan:
    """One unit a chunk; of too many a random part, in the order of the files. Raises `Refused` (invalid_request)."""
    return await asyncio.to_thread(_plan, kit)


def _plan(kit: Kit) -> Plan:
    root = Path(kit.inputs["src_dir"])
    if not root.is_absolute() or not root.is_dir():
        problem = "is no folder" if root.is_absolute() else "must be an absolute path"
        raise refuse(ErrorCode.INVALID_REQUEST, f"inputs.src_dir {problem}: {root}", param="inputs.src_dir")
    units: list[Unit] = []
    dropped: list[Drop] = []
    for file in _files(root):
        name = file.relative_to(root).as_posix()
        try:
            if file.stat().st_size > MOST_BYTES:
                dropped.append(Drop(name, f"is larger than {MOST_BYTES} bytes"))
                continue
            text = read_regular(file).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = "is no text" if isinstance(error, UnicodeDecodeError) else "cannot be read"
            dropped.append(Drop(name, reason))
            continue
        for line, chunk in chunks(text):
            if len(chunk) >= MIN_CHARS:
                units.append(Unit(f"{name}:{line}", chunk))
    most = kit.inputs["max_pairs"]
    if len(units) > most:
        chosen = sorted(random.Random(kit.seed).sample(range(len(units)), most))
        units = [units[number] for number in chosen]
    return Plan(units, dropped)


def _files(root: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in _PASSED
            and not os.path.exists(os.path.join(place, name, "pyvenv.cfg"))
        )
        for name in sorted(files):
            path = Path(place, name)
            if name.endswith(".py") and not name.startswith(".") and not path.is_symlink():
                yield path


def chunks(text: str) -> Iterator[tuple[int, str]]:
    """Each definition at the margin with what follows it, and the line where it begins; decorators belong to theirs."""
    rows = text.splitlines()
    begins = [number for number, row in enumerate(rows) if _BEGIN.match(row)]
    begins = [number for place, number in enumerate(begins) if not _is_decorated(rows, begins, place)]
    for number, end in zip(begins, [*begins[1:], len(rows)], strict=True):
        yield number + 1, "\n".join(rows[number:end]).strip()


def _is_decorated(rows: list[str], begins: list[int], place: int) -> bool:
    """Its chunk has begun already, with a decorator."""
    return place > 0 and rows[begins[place - 1]].startswith("@")


async def make(unit: Unit, kit: Kit) -> Made:
    """Cut between a quarter and three quarters, at the end of a line where there is one."""
    text = unit.data
    first, last = len(text) // 4, len(text) * 3 // 4
    cut = kit.random().randint(first, last)
    line = text.rfind("\n", first, cut + 1)
    cut = line + 1 if line >= first else cut
    before, after = text[:cut], text[cut:]
    if not before.strip() or not after.strip():
        return Made(dropped=[Drop(unit.where, "one part would be empty")])
    return Made([{"prompt": before, "completion": after}])
