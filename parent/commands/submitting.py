"""Jobs as commands begin them: options made of a Struct's fields, submitted to the server that runs, or run here."""

import argparse
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect

from parent.commands import options
from parent.commands.finding import library_of
from parent.commands.following import follow
from parent.commands.importing import run_with_progress
from parent.commands.running import call, find_running
from parent.config import Resolved
from parent.jobs import forms
from parent.jobs.names import Names
from parent.library.machine import find_device
from shared.errors import ErrorCode, refuse

SETTINGS = (*options.LIBRARY, "adapter_roots", "dataset_dirs")
SUBMIT_S = 60.0  # the server looks through its models first


class _Option(NamedTuple):
    flag: str
    field: msgspec.structs.FieldInfo
    type: inspect.Type


def add_fields(parser: argparse.ArgumentParser, spec: type[Any], given: Collection[str] = ()) -> None:
    """An option for each field of the Struct but those in `given`, and what every command that begins a job has."""
    group = parser.add_argument_group("options of the job")
    for option in _options(spec, given):
        default = option.field.default
        if default is msgspec.NODEFAULT and option.field.default_factory is not msgspec.NODEFAULT:
            default = option.field.default_factory()
        if isinstance(option.type, inspect.BoolType):
            group.add_argument(
                option.flag,
                dest=f"field_{option.field.name}",
                action=argparse.BooleanOptionalAction,
                help=f"(default {'on' if default else 'off'})",
            )
            continue
        group.add_argument(
            option.flag,
            dest=f"field_{option.field.name}",
            type=_parser(option.type),
            metavar=_metavar(option.type),
            help=_shown(default),
        )
    group.add_argument("--name", type=options.name, help="what is made shall be called so")
    group.add_argument(
        "--detach", action="store_true", help="leave it to the server that runs, and print the job's id"
    )
    options.add_settings(parser, SETTINGS)


def given_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What was said on the command line, by field."""
    said = {
        name.removeprefix("field_"): value
        for name, value in vars(args).items()
        if name.startswith("field_") and value is not None
    }
    return said | ({"name": args.name} if args.name else {})


def as_path(text: str) -> str:
    """What a person wrote for a folder: whole where it is a path, as it is where it is a name."""
    if "/" in text and text.startswith((".", "/", "~")):
        return str(Path(text).expanduser().absolute())
    return text


def begin(args: argparse.Namespace, kind: str, body: dict[str, Any]) -> int:
    """Have the server do it and watch, or do it here where none runs. The exit code."""
    resolved = options.resolve(args)
    running = find_running(resolved.settings.data_dir)
    if running is not None and running.url:
        job = call(running, "POST", "/api/jobs", {"kind": kind, "spec": body}, timeout_s=SUBMIT_S)["job"]
        if args.detach:
            print(job["id"])
            return 0
        print(f"{job['id']}: {job['output_path'] or kind}", file=sys.stderr)
        return follow(running, job["id"])
    if args.detach:
        raise refuse(
            ErrorCode.ENGINE_UNAVAILABLE,
            f"no server runs on {resolved.settings.data_dir} that could go on with it; start one with `mlxd serve`, or "
            "leave --detach out",
        )
    return _run_here(resolved, kind, body)


def _run_here(resolved: Resolved, kind: str, body: dict[str, Any]) -> int:
    settings = resolved.settings
    names = Names(library_of(settings, resolved.models), settings, trusts_paths=True)
    order = forms.order_of(kind, body, names, find_device())
    done = run_with_progress(settings, order.spec, Path(order.output))
    print(f"{done.output or order.output} is ready ({done.summary})")
    return 0


def _options(spec: type[Any], given: Collection[str]) -> list[_Option]:
    kinds = {field.name: field.type for field in inspect.type_info(spec).fields}  # type: ignore[attr-defined]
    found = []
    for field in msgspec.structs.fields(spec):
        kind = _plain(kinds[field.name])
        if field.name in given or field.name in forms.OURS or isinstance(kind, inspect.DictType):
            continue
        found.append(_Option("--" + field.name.replace("_", "-"), field, kind))
    return found


def _plain(kind: inspect.Type) -> inspect.Type:
    """Without what is known of it beside, and without None."""
    while True:
        if isinstance(kind, inspect.Metadata):
            kind = kind.type
        elif isinstance(kind, inspect.UnionType):
            kind = next(each for each in kind.types if not isinstance(each, inspect.NoneType))
        else:
            return kind


def _parser(kind: inspect.Type) -> Any:
    """Text as a value of this type; the server looks at it once more."""
    match kind:
        case inspect.IntType():
            return int
        case inspect.FloatType():
            return float
        case inspect.LiteralType(values=values) if all(isinstance(value, int) for value in values):
            return int
        case inspect.ListType(item_type=item):
            parse = _parser(_plain(item))

            def listed(text: str) -> list[Any]:
                return [parse(part.strip()) for part in text.split(",") if part.strip()]

            return listed
    return str


def _metavar(kind: inspect.Type) -> str:
    match kind:
        case inspect.LiteralType(values=values):
            return "|".join(map(str, values))
        case inspect.ListType(item_type=item):
            one = _metavar(_plain(item))
            return f"{one},…"
        case inspect.IntType() | inspect.FloatType():
            return "N"
    return "TEXT"


def _shown(default: Any) -> str:
    if default in (None, "", [], msgspec.NODEFAULT):
        return ""
    shown = ",".join(map(str, default)) if isinstance(default, list) else default
    return f"(default {shown})"
