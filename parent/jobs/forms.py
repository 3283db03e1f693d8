"""What a request for a job says, as the spec of a job: every field checked and every fault named, names turned into
places on the disk, outputs given a name that is free, and the memory that it will need.

Adding a kind is one row of `FORMS`. Fields are those of its Struct, which is what `/api/jobs/kinds` shows.
"""

import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from parent.jobs import estimate, kinds
from parent.jobs.names import Names, datasets_dir
from parent.library.adapters import adapters_dir
from parent.library.catalog import ModelEntry
from parent.library.fit import loaded_bytes, runs_wide
from parent.library.machine import Device
from parent.library.roots import models_dir
from parent.values import near
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import CountJob, JobSpec, NoopJob
from shared.lab import Dataset, Finetune, Fuse, MergeAdapters, Quantize
from shared.lab_templates import checked_inputs

OURS = frozenset({"model_id", "url"})  # fields that the server fills in
NAME = "name"  # beside the fields: what is made shall be called so


class Order(NamedTuple):
    """A job as the queue takes it. `output`: the path of what it makes; "" = nothing."""

    spec: JobSpec
    output: str = ""
    needs: int = 0


class Found(NamedTuple):
    """What the names of a request mean. `model`: where it names one."""

    values: dict[str, Any]
    names: Names
    model: ModelEntry | None


class Form(NamedTuple):
    """`means`: fields that hold names, and what of. `also`: other words for fields. `place`, `stem`: where the output
    lies, and what it is called where nobody says. `needs`: bytes of memory, of the spec. `check` raises `Refused` for
    what no single field is wrong about.
    """

    spec: type[Any]
    means: Mapping[str, str] = {}
    also: Mapping[str, str] = {}
    place: Callable[[Path], Path] | None = None
    free: Callable[[Names, str], Path] | None = None
    stem: Callable[[Found], str] = lambda found: "job"
    needs: Callable[[Any, Found, Device], int] = lambda spec, found, device: 0
    check: Callable[[Mapping[str, Any]], object] = lambda values: None


def _leaf(found: Found) -> str:
    return found.model.id.rpartition("/")[2] if found.model else ""


def _quantized(found: Found) -> str:
    """`Name-4bit`, `Name-mxfp4`, `Name-mixed-4.5bpw`, with `-rot42` behind it where it was turned."""
    said = found.values
    mode, bits, bpw = said.get("mode", "affine"), said.get("bits", 4), said.get("target_bpw")
    suffix = f"mixed-{bpw:g}bpw" if bpw else f"{bits}bit" if mode == "affine" else str(mode)
    turned = f"-rot{said.get('rotation_seed', 42)}" if said.get("rotate") else ""
    return f"{_leaf(found)}-{suffix}{turned}"


def _weights(found: Found, device: Device) -> int:
    model = found.model
    return loaded_bytes(model.dtypes, float32=runs_wide(model, device)) if model else 0


def _finetune_needs(spec: Finetune, found: Found, device: Device) -> int:
    return estimate.finetune(spec, _weights(found, device), found.model.config if found.model else {})


def _quantize_needs(spec: Quantize, found: Found, device: Device) -> int:
    model = found.model
    if model is None:
        return 0
    return estimate.quantize(spec, _weights(found, device), model.bytes, model.config)


FORMS: dict[str, Form] = {
    kinds.tag_of(form.spec): form
    for form in (
        Form(NoopJob),
        Form(
            CountJob,
            place=lambda data: data / "counts",
            free=lambda names, name: names.free_count(name),
            stem=lambda found: "count",
            needs=lambda spec, found, device: int(spec.bytes),
        ),
        Form(
            Quantize,
            {"model": "model", "calibration": "text"},
            {
                "model_id": "model",
                "rotate_weights": "rotate",
                "n_calibration": "num_calibration",
                "calibration_mix": "calibration",
            },
            models_dir,
            Names.free_model,
            _quantized,
            _quantize_needs,
        ),
        Form(
            Finetune,
            {"model": "model", "data": "dataset", "warm_start_adapter": "adapter"},
            {
                "model_dir": "model",
                "data_dir": "data",
                "orpo_chunk_size": "head_chunk",
                "adapter_kind": "kind",  # where `kind` is that of the job
            },
            adapters_dir,
            Names.free_adapter,
            lambda found: f"{_leaf(found)}-{found.values.get('method', 'sft')}",
            _finetune_needs,
        ),
        Form(
            Fuse,
            {"model": "model", "adapters": "adapters"},
            {},
            models_dir,
            Names.free_model,
            lambda found: f"{_leaf(found)}-fused",
        ),
        Form(
            MergeAdapters,
            {"adapters": "adapter"},
            {},
            adapters_dir,
            Names.free_adapter,
            lambda found: "-".join(Path(each).name for each in found.values["adapters"]),
        ),
        Form(
            Dataset,
            {},
            {"template_id": "template", "model_name": "model"},
            datasets_dir,
            Names.free_dataset,
            lambda found: f"dataset-{found.values['template']}",
            check=lambda values: checked_inputs(values["template"], values.get("inputs", {})),
        ),
    )
}


def order_of(kind: str, body: Mapping[str, Any], names: Names, device: Device) -> Order:
    """Raises `Refused`: invalid_request with every field that is wrong, unsupported, not_found, conflict, …"""
    form = form_of(kind)
    said = {form.also.get(field, field): value for field, value in body.items()}
    name = said.pop(NAME, "")
    values = _checked(form, said, name)
    form.check(values)
    found = _resolved(form, values, names)
    spec = msgspec.convert({"type": kind} | found.values, form.spec)
    output = ""
    if form.place is not None and form.free is not None:
        place = form.place(names.settings.data_dir)
        output = str(form.free(names, name or names.numbered(form.stem(found), place)))
    return Order(spec, output, form.needs(spec, found, device))


def form_of(kind: str) -> Form:
    """Raises `Refused`: there is no such kind, or jobs of it cannot be run."""
    form = FORMS.get(kind)
    if form is None:
        said = near(kind, FORMS, f"there are {', '.join(FORMS)}")
        raise refuse(ErrorCode.INVALID_REQUEST, f"there is no kind of job {kind[:40]!r}{said}", param="kind")
    if not kinds.is_known(form.spec):
        raise refuse(
            ErrorCode.UNSUPPORTED, f"this version of mlxd cannot run jobs of kind {kind}", param="kind"
        )
    return form


def schemas() -> list[dict[str, Any]]:
    """Every kind that can be submitted, with the JSON schema of its fields."""
    return [_schema(kind, form) for kind, form in FORMS.items() if kinds.is_known(form.spec)]


def _schema(kind: str, form: Form) -> dict[str, Any]:
    (_,), parts = msgspec.json.schema_components([form.spec], ref_template="{name}")
    schema = next(part for title, part in parts.items() if title == form.spec.__name__)
    properties = {
        field: shape | ({"x-names": form.means[field]} if field in form.means else {})
        for field, shape in schema["properties"].items()
        if field not in OURS and field != "type"
    }
    if form.place is not None:
        properties[NAME] = {"type": "string", "default": "", "x-names": "output"}
    known = kinds.KINDS[form.spec]
    return {
        "kind": kind,
        "description": schema.get("description", ""),
        "resumable": known.resumable,
        "uses_gpu": known.uses_gpu,
        "schema": {
            "type": "object",
            "properties": properties,
            "required": [field for field in schema.get("required", []) if field in properties],
        },
    }


def _checked(form: Form, said: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """Each field by itself, so that every fault is told at once."""
    hints = typing.get_type_hints(form.spec, include_extras=True)
    infos = {field.name: field for field in msgspec.structs.fields(form.spec) if field.name not in OURS}
    faults: dict[str, str] = {}
    values: dict[str, Any] = {}
    if not isinstance(name, str):
        faults[NAME] = "expected a text"
    for field, value in said.items():
        if field not in infos:
            faults[field] = f"there is no such field{near(field, infos, 'see GET /api/jobs/kinds')}"
            continue
        try:
            values[field] = msgspec.convert(value, hints[field])
        except (msgspec.ValidationError, RecursionError) as error:
            faults[field] = str(error).lower() if isinstance(error, msgspec.ValidationError) else "too deep"
    for field, info in infos.items():
        if info.required and field not in said:
            faults[field] = "is missing"
    if faults:
        raise bad_fields(faults)
    return values


def _resolved(form: Form, values: Mapping[str, Any], names: Names) -> Found:
    """Names as paths. `model_id` is filled in where there is such a field."""
    given, model = dict(values), None
    faults: dict[str, str] = {}
    first: Refused | None = None
    for field, meaning in form.means.items():
        value = given.get(field)
        if not value:
            continue
        try:
            if meaning == "model":
                model = names.model(value)
                given[field], given["model_id"] = str(model.path), model.id
            elif meaning == "adapters" and model is not None:
                given[field] = [str(path) for path in names.adapters(model, value)]
            elif isinstance(value, list):
                given[field] = [str(getattr(names, meaning)(each)) for each in value]
            else:
                given[field] = str(getattr(names, meaning)(value))
        except Refused as refused:
            faults[field] = refused.failure.message
            first = first or refused
    if first is not None:
        code = first.failure.code if len(faults) == 1 else ErrorCode.INVALID_REQUEST
        raise bad_fields(faults, code)
    return Found(given, names, model)


def bad_fields(faults: Mapping[str, str], code: ErrorCode = ErrorCode.INVALID_REQUEST) -> Refused:
    """Every field that is wrong, in one line; `param` is the first."""
    said = "; ".join(" ".join(f"{field[:40]}: {why}".split()) for field, why in faults.items())
    return refuse(code, said, param=next(iter(faults)))
