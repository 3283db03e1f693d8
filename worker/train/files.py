"""Adapters as folders in mlx-lm's layout: written so that mlx-lm loads them, and read to begin with."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from shared.errors import ErrorCode, refuse
from shared.lab import Finetune
from worker.train.adapter import Adapter, Arrays, Site

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"


def write_adapter(
    folder: Path, adapter: Adapter, arrays: Arrays, spec: Finetune, depth: int, **more: Any
) -> None:
    """`depth`: layers of the model. mlx-lm knows one rank and one scale: smaller ranks are filled up with zeros, other
    scales go into B. `more`: further entries of the configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank = max(site.rank for site in adapter.sites)
    scale = adapter.sites[0].scale
    written: Arrays = {}
    for site in adapter.sites:
        a, b = arrays[f"{site.module}.lora_a"], arrays[f"{site.module}.lora_b"]
        if site.scale != scale:
            b = b * (site.scale / scale)
        missing = rank - site.rank
        written[f"{site.module}.lora_a"] = mx.pad(a, [(0, 0), (0, missing)]) if missing else a
        written[f"{site.module}.lora_b"] = mx.pad(b, [(0, missing), (0, 0)]) if missing else b
        if adapter.is_dora:
            written[f"{site.module}.m"] = arrays[f"{site.module}.m"]
    config = {
        "fine_tune_type": spec.kind,
        "num_layers": depth - min(site.layer for site in adapter.sites),
        "lora_parameters": {
            "rank": rank,
            "scale": scale,
            "dropout": spec.lora_dropout,
            "keys": sorted({site.key for site in adapter.sites}),
        },
        "base_model": spec.model_id,
        "base_model_name_or_path": spec.model_id or spec.model,
        "method": spec.method,
        **more,
    }
    mx.save_safetensors(str(folder / WEIGHTS), written, {"format": "mlx"})
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")


def warm_start(folder: Path, adapter: Adapter, arrays: Arrays) -> Arrays:
    """`arrays` with what the adapter in `folder` has of them. Raises `Refused` (invalid_request): it is another."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        held = mx.load(str(folder / WEIGHTS))
        parameters = config["lora_parameters"]
        scale, kind = float(parameters["scale"]), str(config.get("fine_tune_type", "lora"))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise _fault(folder, f"cannot be read as an adapter in mlx-lm's layout ({_line(error)})") from None
    assert isinstance(held, dict)
    if kind != ("dora" if adapter.is_dora else "lora"):
        raise _fault(folder, f"is {kind}; choose kind {kind}, or another adapter")
    found = dict(arrays)
    for site in adapter.sites:
        a, b = held.pop(f"{site.module}.lora_a", None), held.pop(f"{site.module}.lora_b", None)
        if a is None or b is None:
            continue
        found.update(_taken(folder, site, a, b, scale, arrays))
        if adapter.is_dora and (m := held.pop(f"{site.module}.m", None)) is not None:
            if m.shape != arrays[f"{site.module}.m"].shape:
                raise _fault(folder, f"{site.module}.m has shape {list(m.shape)}")
            found[f"{site.module}.m"] = m.astype(mx.float32)
    if held:
        raise _fault(
            folder,
            f"has {min(held)}, which is not trained here; choose target_modules and num_layers like it",
        )
    mx.eval(found)
    return found


def _taken(folder: Path, site: Site, a: mx.array, b: mx.array, scale: float, arrays: Arrays) -> Arrays:
    out, wide = site.linear.shape
    rank = a.shape[-1]
    if a.shape != (wide, rank) or b.shape != (rank, out):
        raise _fault(
            folder,
            f"{site.module} is [{wide}, r] and [r, {out}], and the adapter has {list(a.shape)} and {list(b.shape)}; "
            "it is of another model",
        )
    if rank > site.rank and not (mx.any(a[:, site.rank :]) | mx.any(b[site.rank :])).item():
        a, b, rank = (
            a[:, : site.rank],
            b[: site.rank],
            site.rank,
        )  # zeros that `write_adapter` filled it up with
    if rank > site.rank:
        raise _fault(folder, f"{site.module} has rank {rank} there; choose rank {rank} or more")
    name = site.module
    drawn, missing = arrays[f"{name}.lora_a"], site.rank - rank
    b = b.astype(mx.float32) * (scale / site.scale)
    return {
        f"{name}.lora_a": mx.concatenate([a.astype(mx.float32), drawn[:, rank:]], axis=1),
        f"{name}.lora_b": mx.pad(b, [(0, missing), (0, 0)]) if missing else b,
    }


def _fault(folder: Path, text: str) -> Exception:
    return refuse(ErrorCode.INVALID_REQUEST, f"{folder}: {text}", param="warm_start_adapter")


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
