"""Add adapters to the weights of a model: W + scale (A B)^T, quantized again as it was; a new model directory.

Shard by shard: what no adapter changes is copied byte by byte, what one changes is in memory a module at a time.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from shared.adapter import Adapter, AdapterModule, canonical, inspect_adapter
from shared.checkpoint import INDEX, inspect, tensors_of
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import JobDone, JobLog, JobStage
from shared.lab import Fuse
from shared.tensor_headers import TensorInfo
from worker.adapters.mount import pair
from worker.jobs.context import JobContext, make_scratch, publish, require_space
from worker.jobs.safetensors_writer import Buffer, Planned, write_file
from worker.weights import written_scheme

PIECE = 8 << 20
CARD = "mlxd.json"
_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}


@dataclass
class Source:
    """The model's files: tensors by name, and what config.json says of their quantization."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    scheme: Mapping[str, Any]
    offsets: dict[str, dict[str, tuple[int, int]]] = field(default_factory=dict)

    def where(self, name: str) -> tuple[Path, int, int]:
        """The file of a tensor, and the place of its bytes there."""
        file = self.tensors[name].file
        if file not in self.offsets:
            with (self.path / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            begin = 8 + length
            self.offsets[file] = {
                each: (begin + how["data_offsets"][0], begin + how["data_offsets"][1])
                for each, how in header.items()
            }
        begin, end = self.offsets[file][name]
        return self.path / file, begin, end

    def pieces(self, name: str) -> Iterator[Buffer]:
        """Its bytes as they are."""
        path, begin, end = self.where(name)
        with path.open("rb") as file:
            file.seek(begin)
            while begin < end:
                piece = file.read(min(PIECE, end - begin))
                if not piece:
                    raise refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: it has become shorter; try again")
                begin += len(piece)
                yield piece

    def array(self, name: str) -> mx.array:
        loaded = mx.load(str(self.path / self.tensors[name].file), format="safetensors")
        assert isinstance(loaded, dict)
        return loaded[name]

    def how(self, module: str) -> dict[str, Any]:
        """Mode, bits and group of a quantized module."""
        given = written_scheme(self.scheme, module)
        return {
            "mode": "affine",
            **{key: given[key] for key in ("group_size", "bits", "mode") if key in given},
        }


def run(spec: Fuse, ctx: JobContext) -> JobDone:
    """Fuse. Raises `Refused` with what does not fit; nothing is written then."""
    assert ctx.output is not None
    if ctx.output.exists():
        raise refuse(ErrorCode.CONFLICT, f"{ctx.output} exists; choose another name, or remove it")
    model = inspect(Path(spec.model))
    source = Source(Path(spec.model), tensors_of(model), model.config.get("quantization") or {})
    changes = _changes(spec, source)
    plans = {
        shard.file: list(_planned(source, shard.file, changes, dequantize=spec.dequantize))
        for shard in model.shards
    }
    total = sum(tensor.num_bytes for plan in plans.values() for tensor in plan)
    ctx.output.parent.mkdir(parents=True, exist_ok=True)
    require_space(ctx.output.parent, total)
    scratch = make_scratch(ctx.output)
    try:
        _write(source, plans, scratch, total, ctx)
        _write_small(spec, source, scratch)
        publish(scratch, ctx.output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    summary = f"{ctx.output.name}: {len(changes)} of the model's modules are changed"
    ctx.emit(JobLog(summary))
    return JobDone(output=str(ctx.output), summary=summary)


# ---------------------------------------------------------------- what changes

Change = list[tuple[Adapter, AdapterModule]]


def _changes(spec: Fuse, source: Source) -> dict[str, Change]:
    """What is added to which modules, by the model's own names. Raises `Refused`."""
    own = {
        canonical(name.removesuffix(".weight")): name.removesuffix(".weight")
        for name in source.tensors
        if name.endswith(".weight")
    }
    found: dict[str, Change] = {}
    adapters = [inspect_adapter(Path(path)) for path in spec.adapters]
    for adapter in adapters:
        if adapter.kind == "dora" and len(adapters) > 1:
            raise _bad(f"{adapter.path} is a DoRA, which cannot be added to others; fuse it alone")
        for name, module in adapter.modules.items():
            if name not in own:
                raise _bad(
                    f"{adapter.path} does not fit: it changes {name}, which the files of {spec.model} have not"
                )
            shape = _shape(source, own[name])
            if shape != module.shape:
                raise _bad(
                    f"{adapter.path} does not fit: {name} is {list(module.shape)} in it and {list(shape)} in the model"
                )
            found.setdefault(own[name], []).append((adapter, module))
    return found


def _shape(source: Source, module: str) -> tuple[int, ...]:
    shape = list(source.tensors[f"{module}.weight"].shape)
    if f"{module}.scales" in source.tensors:
        shape[-1] = shape[-1] * 32 // source.how(module)["bits"]
    return tuple(shape)


def _dense(source: Source, module: str) -> mx.array:
    """Its weight multiplied out, in float32."""
    weight = source.array(f"{module}.weight")
    if f"{module}.scales" not in source.tensors:
        return weight.astype(mx.float32)
    biases = source.array(f"{module}.biases") if f"{module}.biases" in source.tensors else None
    plain: mx.array = mx.dequantize(weight, source.array(f"{module}.scales"), biases, **source.how(module))
    return plain.astype(mx.float32)


def _added(weight: mx.array, change: Change) -> mx.array:
    for adapter, module in change:
        tensors = mx.load(adapter.weights, format="safetensors")
        assert isinstance(tensors, dict)
        a, b = (one.astype(mx.float32) for one in pair(module, tensors))
        weight = weight + module.scale * (a @ b).T
        if module.magnitude:
            magnitude = tensors[module.magnitude].astype(mx.float32).reshape(-1)
            weight = weight * (magnitude / mx.linalg.norm(weight, axis=1))[:, None]
    if not bool(mx.all(mx.isfinite(weight)).item()):
        raise _bad(f"{change[0][0].path}: with it the weights are no numbers; train it anew")
    return weight


# ---------------------------------------------------------------- files


def _planned(
    source: Source, file: str, changes: Mapping[str, Change], *, dequantize: bool
) -> Iterator[Planned]:
    """The tensors of one file as they shall be."""
    made: dict[str, mx.array] = {}

    def compute(name: str) -> Iterator[Buffer]:
        module = name.rpartition(".")[0]
        if name not in made:
            made.update(_fused(source, module, changes.get(module, []), dequantize=dequantize))
        raw: Any = mx.contiguous(made.pop(name)).reshape(-1).view(mx.uint8)
        yield memoryview(raw)

    for name, tensor in source.tensors.items():
        if tensor.file != file:
            continue
        module, _, leaf = name.rpartition(".")
        packed = f"{module}.scales" in source.tensors and leaf in ("weight", "scales", "biases")
        if packed and dequantize:
            if leaf == "weight":
                scales = source.tensors[f"{module}.scales"].dtype
                dtype = scales if scales in _FLOATS else "BF16"  # scales of mxfp4 and the like are bytes
                shape = (*tensor.shape[:-1], tensor.shape[-1] * 32 // source.how(module)["bits"])
                yield Planned(name, dtype, shape, lambda name=name: compute(name))  # type: ignore[misc]
        elif module in changes and (leaf == "weight" or packed):
            yield Planned(name, tensor.dtype, tuple(tensor.shape), lambda name=name: compute(name))  # type: ignore[misc]
        else:
            yield Planned(name, tensor.dtype, tuple(tensor.shape), lambda name=name: source.pieces(name))  # type: ignore[misc]


def _fused(source: Source, module: str, change: Change, *, dequantize: bool) -> dict[str, mx.array]:
    """The tensors of a module, in the types that they had."""
    weight = _added(_dense(source, module), change)
    scales = f"{module}.scales"
    if scales not in source.tensors:
        return {f"{module}.weight": weight.astype(source.array(f"{module}.weight").dtype)}
    weight = weight.astype(_FLOATS.get(source.tensors[scales].dtype, mx.bfloat16))
    if dequantize:
        return {f"{module}.weight": weight}
    parts = mx.quantize(weight, **source.how(module))
    made = dict(zip((f"{module}.weight", scales, f"{module}.biases"), parts, strict=False))
    mx.eval(list(made.values()))
    return made


def _write(
    source: Source, plans: Mapping[str, list[Planned]], folder: Path, total: int, ctx: JobContext
) -> None:
    done = 0

    def told(tensor: Planned) -> None:
        nonlocal done
        ctx.check()
        ctx.emit(JobStage("fuse", done, total))
        done += tensor.num_bytes

    for file, plan in plans.items():
        write_file(folder / file, plan, told, {"format": "mlx"})
        mx.clear_cache()
    ctx.emit(JobStage("fuse", total, total))
    if (source.path / INDEX).exists():
        index = {
            "metadata": {"total_size": total},
            "weight_map": {tensor.name: file for file, plan in sorted(plans.items()) for tensor in plan},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_small(spec: Fuse, source: Source, folder: Path) -> None:
    """Everything beside the weights; a card that says where they come from."""
    for file in sorted(source.path.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (INDEX, CARD, "README.md"):
            shutil.copyfile(file, folder / file.name)
    if spec.dequantize:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for each in (config, config.get("text_config")):
            for key in ("quantization", "quantization_config"):
                if isinstance(each, dict):
                    each.pop(key, None)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    names = " + ".join(Path(path).name for path in spec.adapters)
    card = {"name": folder.name, "origin": f"{spec.model_id or source.path.name} + {names}"}
    (folder / CARD).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def _bad(fault: str) -> Refused:
    return refuse(ErrorCode.INVALID_REQUEST, fault.replace("\n", " "), param="adapter")
