"""Check this machine, and say what to do about what is wrong.

  mlxd doctor
  mlxd doctor --json

Exit code 0: nothing is broken (there may be advice); 1: something is.
"""

import argparse
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Literal

import msgspec

from parent.commands import options
from parent.commands.finding import library_of
from parent.commands.machine import mlx_device, port_is_free
from parent.commands.running import find_running
from parent.config import Resolved, Settings
from parent.library.catalog import ModelEntry
from parent.library.machine import find_device, memory_bytes, mlx_version
from parent.library.roots import models_dir
from parent.library.starter import STARTER
from parent.workers import one_row
from parent.workers.blas import choose
from shared.errors import Refused
from shared.units import format_bytes
from shared.version import VERSION

_MARKS = {"ok": "ok  ", "advice": "note", "broken": "FAIL"}


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding: what was looked at, how it is, and what to do."""

    subject: str
    state: Literal["ok", "advice", "broken"]
    finding: str
    todo: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    options.add_settings(parser, ("data_dir", "host", "port", "blas"))


def run(args: argparse.Namespace) -> int:
    resolved = options.resolve(args)
    settings = resolved.settings
    checks = [
        *_software(settings.memory_budget_bytes),
        *_blas(settings),
        *_data(settings),
        _port(settings),
        *_models(resolved),
    ]
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(checks)).decode())
    else:
        width = max(len(check.subject) for check in checks)
        for check in checks:
            todo = f"\n{'':{width + 8}}{check.todo}" if check.todo else ""
            print(f"{_MARKS[check.state]}  {check.subject:<{width}}  {check.finding}{todo}")
    return 1 if any(check.state == "broken" for check in checks) else 0


def _software(budget_bytes: int) -> list[Check]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores"
    checks = [
        Check("mlxd", "ok", f"{VERSION}, {Path(__file__).resolve().parents[2]}"),
        Check("python", "ok", f"{platform.python_version()}, {sys.executable}"),
        Check("system", "ok", f"{system}, {format_bytes(memory_bytes())} of memory"),
    ]
    room = find_device(budget_bytes)
    for_models = (
        f"{format_bytes(room.budget_bytes)} of {format_bytes(room.memory_bytes)} of {room.budget_name}"
    )
    checks.append(Check("models get", "ok", for_models))
    version = mlx_version()
    if not version:
        extra = "" if sys.platform == "darwin" else "[cpu]"
        return [*checks, Check("mlx", "broken", "not installed", f"pip install 'mlx{extra}'")]
    loads, device = mlx_device()
    if not loads:
        return [*checks, Check("mlx", "broken", f"{version} does not load: {device}", "install mlx again")]
    return [*checks, Check("mlx", "ok", f"{version}, device {device}")]


def _blas(settings: Settings) -> list[Check]:
    try:
        chosen = choose(settings)
    except Refused as refused:
        return [Check("blas", "broken", str(refused), "set blas = auto, or the path of an OpenBLAS")]
    checks = [Check("blas", "advice" if chosen.advice else "ok", chosen.description, chosen.advice)]
    return [*checks, _kernel(settings, chosen.path)] if chosen.path else checks


def _kernel(settings: Settings, blas: str) -> Check:
    """The library in front of the BLAS. It is built here too: so one sees why it cannot be."""
    front = one_row.build(blas, settings.data_dir / "cache")
    if front.path is None:
        todo = "answers are right, but slower; once that is mended, `mlxd restart` and load the models again"
        return Check(
            "kernel for few rows",
            "advice",
            f"products of few rows are left to the BLAS: {front.reason}",
            todo,
        )
    if front.is_new and find_running(settings.data_dir):
        todo = "`mlxd restart`, and load the models again"
        return Check(
            "kernel for few rows",
            "advice",
            f"built just now: the running server goes without {front.path}",
            todo,
        )
    return Check("kernel for few rows", "ok", str(front.path))


def _data(settings: Settings) -> list[Check]:
    folder = settings.data_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        todo = "choose another with --data-dir or MLXD_DATA_DIR"
        return [Check("data", "broken", f"{folder} is not writable: {error.strerror}", todo)]
    free = shutil.disk_usage(folder).free
    if free < STARTER.needed_bytes:
        low = (
            f"{format_bytes(free)} free; making the starter model needs {format_bytes(STARTER.needed_bytes)}"
        )
        return [Check("data", "ok", str(folder)), Check("disk", "advice", low, "free some room")]
    return [Check("data", "ok", str(folder)), Check("disk", "ok", f"{format_bytes(free)} free")]


def _port(settings: Settings) -> Check:
    if running := find_running(settings.data_dir):
        return Check("server", "ok", f"runs at {running.url}, pid {running.pid}")
    if port_is_free(settings.host, settings.port):
        return Check("port", "ok", f"{settings.host}:{settings.port} is free")
    todo = "stop the program that has it, or serve with --port"
    return Check("port", "advice", f"{settings.host}:{settings.port} is taken", todo)


def _models(resolved: Resolved) -> list[Check]:
    entries = library_of(resolved.settings, resolved.models).entries
    return [_listed(entries, models_dir(resolved.settings.data_dir)), *_options(resolved, entries)]


def _listed(entries: list[ModelEntry], folder: Path) -> Check:
    if not entries:
        return Check("models", "advice", f"none in {folder}", "mlxd pull starter")
    useless = [entry for entry in entries if entry.error]
    if not useless:
        return Check("models", "ok", ", ".join(entry.id for entry in entries))
    first = useless[0]
    what = "cannot be served" if first.unsupported else "broken"
    todo = "" if first.unsupported else "download it again"
    if first.root == "own":
        todo = f"mlxd rm {first.id}" + ("" if first.unsupported else ", or repair it")
    return Check("models", "advice", f"{len(useless)} of {len(entries)} {what}: {first.error}", todo)


def _options(resolved: Resolved, entries: list[ModelEntry]) -> list[Check]:
    """A table of no model is easily a misspelt one."""
    names = {name for entry in entries for name in (entry.id, *entry.aliases)}
    lost = ", ".join(f'[models."{name}"]' for name in resolved.models if name not in names)
    if not lost:
        return []
    finding = f"{lost} in {resolved.config_file}: there is no such model"
    return [Check("options", "advice", finding, "write the id that `mlxd ls` shows")]
