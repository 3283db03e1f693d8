"""One adapter out of several, exactly: (x A1) B1 s1 + (x A2) B2 s2 = x [A1 A2] [s1 B1; s2 B2].

Ranks lie side by side, each with its factor in B, and the scale of the whole is 1. In mlx-lm's layout, in float32.
"""

import json
import re
import shutil
from pathlib import Path

import mlx.core as mx

from shared.adapter import Adapter, inspect_adapter
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import JobDone, JobStage
from shared.lab import MergeAdapters
from worker.adapters.mount import pair
from worker.jobs.context import JobContext, make_scratch, publish, require_space

Pair = tuple[mx.array, mx.array]


def run(spec: MergeAdapters, ctx: JobContext) -> JobDone:
    """Merge. Raises `Refused` with what does not go together; nothing is written then."""
    assert ctx.output is not None
    if ctx.output.exists():
        raise refuse(ErrorCode.CONFLICT, f"{ctx.output} exists; choose another name, or remove it")
    factors = spec.factors or [1.0] * len(spec.adapters)
    if len(factors) != len(spec.adapters):
        raise _bad(f"{len(factors)} factors for {len(spec.adapters)} adapters; give one each")
    adapters = [inspect_adapter(Path(path)) for path in spec.adapters]
    _check(adapters)
    merged: dict[str, list[Pair]] = {}
    names: dict[str, str] = {}
    for number, (adapter, factor) in enumerate(zip(adapters, factors, strict=True)):
        ctx.check()
        ctx.emit(JobStage("merge", number, len(adapters)))
        tensors = mx.load(adapter.weights, format="safetensors")
        assert isinstance(tensors, dict)
        for name, module in adapter.modules.items():
            a, b = (one.astype(mx.float32) for one in pair(module, tensors))
            if not bool((mx.all(mx.isfinite(a)) & mx.all(mx.isfinite(b))).item()):
                raise _bad(
                    f"{adapter.weights}: tensor {module.a} or {module.b} has values that are no numbers"
                )
            names.setdefault(name, re.sub(r"\.lora_[aA].*", "", module.a).removeprefix("base_model.model."))
            merged.setdefault(name, []).append((a, b * (module.scale * factor)))
    out: dict[str, mx.array] = {}
    for name, pairs in merged.items():
        out[f"{names[name]}.lora_a"] = mx.concatenate([a for a, _ in pairs], axis=1)
        out[f"{names[name]}.lora_b"] = mx.concatenate([b for _, b in pairs], axis=0)
    mx.eval(list(out.values()))
    ctx.output.parent.mkdir(parents=True, exist_ok=True)
    require_space(ctx.output.parent, sum(array.nbytes for array in out.values()))
    rank = max(array.shape[1] for name, array in out.items() if name.endswith(".lora_a"))
    scratch = make_scratch(ctx.output)
    try:
        mx.save_safetensors(str(scratch / "adapters.safetensors"), out, {"format": "mlx"})
        config = _config(spec, adapters, factors, rank, list(names.values()))
        (scratch / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        publish(scratch, ctx.output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ctx.emit(JobStage("merge", len(adapters), len(adapters)))
    summary = f"{ctx.output.name}: {len(adapters)} adapters, {len(merged)} modules, rank {rank}"
    return JobDone(output=str(ctx.output), summary=summary)


def _check(adapters: list[Adapter]) -> None:
    first = adapters[0]
    shapes: dict[str, tuple[int, int]] = {}
    for adapter in adapters:
        if adapter.kind == "dora":
            raise _bad(f"{adapter.path} is a DoRA, whose factors depend on the model; fuse it instead")
        if first.base_models and adapter.base_models and not _bases(first) & _bases(adapter):
            raise _bad(
                f"{first.path} was made for {first.base_models[0]}, and {adapter.path} for {adapter.base_models[0]}"
            )
        for name, module in adapter.modules.items():
            if shapes.setdefault(name, module.shape) != module.shape:
                raise _bad(
                    f"{name} is {list(module.shape)} in {adapter.path} and {list(shapes[name])} in one before it"
                )


def _bases(adapter: Adapter) -> set[str]:
    """The last parts of their names: one says an id where another says a path."""
    return {name.rstrip("/").rpartition("/")[2].casefold() for name in adapter.base_models}


def _config(
    spec: MergeAdapters, adapters: list[Adapter], factors: list[float], rank: int, modules: list[str]
) -> dict[str, object]:
    """mlx-lm's, with where it comes from."""
    keys = sorted({re.sub(r"^.*?layers\.\d+\.", "", module) for module in modules})
    base = next((name for adapter in adapters for name in adapter.base_models), "")
    named = {"base_model": base, "base_model_name_or_path": base} if base else {}
    return {
        "fine_tune_type": "lora",
        "num_layers": -1,
        "lora_parameters": {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": keys},
        **named,
        "merged_from": [
            {"adapter": Path(path).name, "factor": factor}
            for path, factor in zip(spec.adapters, factors, strict=True)
        ],
    }


def _bad(fault: str) -> Refused:
    return refuse(ErrorCode.INVALID_REQUEST, fault.replace("\n", " "), param="adapter")
