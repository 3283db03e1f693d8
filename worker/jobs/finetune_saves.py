"""Checkpoints of a run in the job's folder: a folder each, which appears whole; the last two are kept.

Two, because the queue may not have heard of the last one yet when the machine goes down.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from worker.jobs.context import make_scratch, publish

VERSION = 1
KEPT = 2
_ARRAYS, _VALUES = "state.safetensors", "state.json"
_NAME = "step-{:08d}"


class Unusable(Exception):
    """A checkpoint that cannot be gone on from; says why."""


def save(work: Path, step: int, arrays: dict[str, mx.array], values: dict[str, Any]) -> str:
    """-> its name, for `load`. One that is there already is the same and stays."""
    name = _NAME.format(step)
    target = work / name
    if not target.exists():
        scratch = make_scratch(target)
        mx.save_safetensors(str(scratch / _ARRAYS), arrays)
        text = json.dumps({"version": VERSION, **values})
        (scratch / _VALUES).write_text(text, encoding="utf-8")
        publish(scratch, target)
    for old in names(work)[:-KEPT]:
        if old < name:
            shutil.rmtree(work / old, ignore_errors=True)
    return name


def names(work: Path) -> list[str]:
    """Of the checkpoints in `work`, the oldest first."""
    return sorted(path.name for path in work.glob("step-*") if path.is_dir())


def load(work: Path, name: str, digest: str) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Raises `Unusable`. `digest`: of what the run depends on."""
    folder = work / Path(name).name
    try:
        values = json.loads((folder / _VALUES).read_text(encoding="utf-8"))
        arrays = mx.load(str(folder / _ARRAYS))
        mx.eval(arrays)
        version, found = values["version"], values["digest"]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise Unusable(f"{name} cannot be read ({' '.join(str(error).split())[:200]})") from None
    if version != VERSION:
        raise Unusable(f"{name} was written by another version of mlxd")
    if found != digest:
        raise Unusable(f"{name} is of other settings, another model or other data")
    assert isinstance(arrays, dict)
    return arrays, values


def go_on(
    work: Path,
    resume: str,
    digest: str,
    restore: Callable[[dict[str, mx.array], dict[str, Any]], None],
    log: Callable[[str], None],
) -> dict[str, Any] | None:
    """Restore the checkpoint `resume`, or where it cannot be the newest that can; None = there is none.

    Checkpoints that are newer than the one restored are removed: they will be written again.
    """
    usable = [name for name in reversed(names(work)) if name != resume]
    for name in [resume, *usable] if resume else []:
        try:
            arrays, values = load(work, name, digest)
            restore(arrays, values)
        except (Unusable, KeyError, ValueError) as error:
            log(f"cannot go on from a checkpoint: {error}")
            continue
        for other in names(work):
            if other > Path(name).name:
                shutil.rmtree(work / other, ignore_errors=True)
        return values
    for name in names(work):
        shutil.rmtree(work / name, ignore_errors=True)
    return None
