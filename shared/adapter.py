"""Adapters (LoRA, DoRA) on disk, as their files say: what they change, how large they are, whose they are.

A folder with `adapters.safetensors` (mlx-lm) or `adapter_model.safetensors` (PEFT), itself or in `best/`, and a config.
Only headers are read. mlx-lm holds A as [in, rank] and B as [rank, out], PEFT both transposed under a prefix.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from shared.errors import ErrorCode, Refused, refuse
from shared.files import NotRegular, decode_json, read_regular
from shared.tensor_headers import TensorInfo, read_header

WEIGHTS = ("adapters.safetensors", "adapter_model.safetensors")
CONFIGS = ("optiq_lora_config.json", "adapter_config.json")
BEST = "best"
MOST_RANK = 1 << 14
FLOATS = ("F32", "F16", "BF16")

_PREFIXES = ("base_model.", "model.", "language_model.")
_LEAF = re.compile(r"(.+)\.(lora_[abAB]|lora_magnitude_vector|m)(?:\.(?:default\.)?weight|\.default)?")
_ROLES: Mapping[str, Literal["a", "b", "m"]] = {
    "lora_a": "a",
    "lora_A": "a",
    "lora_b": "b",
    "lora_B": "b",
    "lora_magnitude_vector": "m",
    "m": "m",
}
_UNLIKE = (  # of PEFT's config: what makes another sum of it
    ("fan_in_fan_out", "it was made for weights that lie the other way round"),
    ("use_qalora", "QALoRA is not supported"),
    ("use_bdlora", "BDLoRA is not supported"),
    ("lora_bias", "it has a bias of its own"),
    ("modules_to_save", "it replaces whole modules"),
    ("trainable_token_indices", "it replaces tokens"),
    ("alora_invocation_tokens", "it begins in the middle of a prompt"),
)


class AdapterModule(msgspec.Struct, frozen=True):
    """What is added to one projection of `shape` (out, in): the names of its tensors, and the factor of A B.

    `magnitude` "": none, it is no DoRA. `by_rows`: A and B are stored transposed, [rank, in] and [out, rank].
    """

    a: str
    b: str
    magnitude: str
    rank: int
    shape: tuple[int, int]
    scale: float
    by_rows: bool


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter folder. `modules` by their names without prefixes, see `canonical`; `rank`: the greatest of them.

    `base_models`: what its config calls the model that it was made for, any number of names.
    """

    path: str
    weights: str  # path of the file
    config: str
    kind: Literal["lora", "dora"]
    layout: Literal["mlx", "peft"]
    modules: dict[str, AdapterModule]
    rank: int
    scale: float
    base_models: list[str]
    num_bytes: int  # of its tensors


def canonical(module: str) -> str:
    """The name of a module without what different exports put before it: `layers.0.self_attn.q_proj`."""
    while True:
        shorter = next((module.removeprefix(each) for each in _PREFIXES if module.startswith(each)), module)
        if shorter == module:
            return module
        module = shorter


def files_of(path: Path) -> tuple[Path, Path] | None:
    """Weights and config of an adapter folder; None where it is none."""
    for folder in (path, path / BEST):
        weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
        if weights is not None:
            places = [place / name for place in (folder, path) for name in CONFIGS]
            return weights, next((file for file in places if file.is_file()), folder / CONFIGS[-1])
    return None


def inspect_adapter(path: Path) -> Adapter:
    """Describe the adapter folder at `path`. Raises `Refused` (bad_checkpoint, unsupported) in one line."""
    found = files_of(path)
    if found is None:
        raise _bad(path, f"no {' and no '.join(WEIGHTS)}; this is not an adapter")
    file, config_file = found
    config = _read_config(config_file)
    tensors = read_header(file)
    by_module = _by_module(file, tensors)
    layout: Literal["mlx", "peft"] = "peft" if _is_peft(config, tensors) else "mlx"
    modules = {
        name: _module(file, name, parts, tensors, config, config_file, by_rows=layout == "peft")
        for name, parts in sorted(by_module.items())
    }
    is_dora = any(module.magnitude for module in modules.values())
    _check_config(config_file, config, layout, is_dora=is_dora)
    scales = [module.scale for module in modules.values()]
    return Adapter(
        path=str(path),
        weights=str(file),
        config=str(config_file),
        kind="dora" if is_dora else "lora",
        layout=layout,
        modules=modules,
        rank=max(module.rank for module in modules.values()),
        scale=max(scales),
        base_models=_bases(config),
        num_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
    )


def misfit(adapter: Adapter, shapes: Mapping[str, tuple[int, int]]) -> str:
    """What of an adapter is not in a model whose projections (canonical names) have these shapes; "" = it fits."""
    for name, module in adapter.modules.items():
        there = shapes.get(name)
        if there is None:
            return f"it changes {name}, which the model has not"
        if there != module.shape:
            return f"{name} is {_by(module.shape)} in it and {_by(there)} in the model"
    return ""


# ---------------------------------------------------------------- tensors


def _by_module(file: Path, tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, str]]:
    """Canonical name to the tensors of each role."""
    found: dict[str, dict[str, str]] = {}
    for name, tensor in tensors.items():
        parts = _LEAF.fullmatch(name)
        if parts is None:
            raise _bad(file, f"tensor {name} is not part of a LoRA adapter")
        if tensor.dtype not in FLOATS:
            raise _bad(file, f"tensor {name} is {tensor.dtype}; it has to be one of {', '.join(FLOATS)}")
        module, role = canonical(parts[1]), _ROLES[parts[2]]
        if role in found.setdefault(module, {}):
            raise _bad(file, f"tensors {found[module][role]} and {name} are of one module")
        found[module][role] = name
    if not found:
        raise _bad(file, "it has no tensors")
    return found


def _module(
    file: Path,
    name: str,
    parts: Mapping[str, str],
    tensors: Mapping[str, TensorInfo],
    config: Mapping[str, Any],
    config_file: Path,
    *,
    by_rows: bool,
) -> AdapterModule:
    lacking = next((role for role in ("a", "b") if role not in parts), None)
    if lacking is not None:
        raise _bad(file, f"{name} has no lora_{lacking}")
    a, b = (list(tensors[parts[role]].shape) for role in ("a", "b"))
    for role, shape in (("a", a), ("b", b)):
        if len(shape) != 2:
            raise _bad(
                file,
                f"tensor {parts[role]} has shape {shape}; only plain projections (two dimensions) are supported",
            )
    ins, rank = (a[1], a[0]) if by_rows else (a[0], a[1])
    other, out = (b[1], b[0]) if by_rows else (b[0], b[1])
    if rank != other or not 1 <= rank <= MOST_RANK or not ins or not out:
        raise _bad(file, f"{name}: tensors of shape {a} and {b} have no rank in common")
    magnitude = parts.get("m", "")
    if magnitude and math.prod(tensors[magnitude].shape) != out:
        raise _bad(file, f"tensor {magnitude} has shape {tensors[magnitude].shape}, expected [{out}]")
    scale = _scale(config, config_file, name, rank)
    return AdapterModule(parts["a"], parts["b"], magnitude, rank, (out, ins), scale, by_rows)


def _is_peft(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    if "peft_type" in config:
        return True
    if "fine_tune_type" in config or "lora_parameters" in config:
        return False
    return any(".lora_A" in name for name in tensors)


# ---------------------------------------------------------------- config


def _read_config(file: Path) -> dict[str, Any]:
    try:
        config = decode_json(read_regular(file))
    except FileNotFoundError:
        raise _bad(file, "there is no such file; without it the adapter's scale is not known") from None
    except NotRegular as error:
        raise _bad(file, str(error.strerror)) from None
    except ValueError as error:
        raise _bad(file, f"not JSON: {error}") from None
    except OSError as error:
        raise _bad(file, f"cannot be read ({error.strerror})") from None
    if not isinstance(config, dict):
        raise _bad(file, "not a JSON object")
    return config


def _check_config(file: Path, config: Mapping[str, Any], layout: str, *, is_dora: bool) -> None:
    kind = config.get("peft_type") if layout == "peft" else config.get("fine_tune_type")
    if kind not in (None, "LORA", "lora", "dora"):
        raise refuse(
            ErrorCode.UNSUPPORTED, f"{file}: the adapter is of type {kind}; only lora and dora are supported"
        )
    for key, why in _UNLIKE:
        if config.get(key):
            raise refuse(ErrorCode.UNSUPPORTED, f"{file}: {key} is {config[key]!r}: {why}")
    if config.get("bias", "none") != "none":
        raise refuse(ErrorCode.UNSUPPORTED, f"{file}: bias is {config['bias']!r}; only none is supported")
    if (config.get("use_dora") or kind == "dora") and not is_dora:
        raise _bad(file, "it says DoRA, and the weights have no magnitudes")


def _scale(config: Mapping[str, Any], file: Path, module: str, rank: int) -> float:
    """The factor of A B of one module: `lora_parameters.scale` (mlx-lm), else alpha over rank, or over its root."""
    given = config.get("lora_parameters")
    inner: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    scale = inner.get("scale", config.get("scale"))
    if scale is None and "lora_alpha" not in config and "alpha" not in inner:
        scale = None if "peft_type" in config else 20.0  # mlx-lm's
    if scale is None:
        alpha = inner.get("alpha", config.get("lora_alpha", 16))
        alpha = _by_pattern(config.get("alpha_pattern"), module, alpha, file)
        spread = config.get("use_rslora") or config.get("rs_lora") or inner.get("rs_lora")
        divisor = math.sqrt(rank) if spread else rank
        scale = _number(alpha, file, "lora_alpha") / divisor
    return _number(scale, file, "scale")


def _by_pattern(patterns: Any, module: str, default: Any, file: Path) -> Any:
    """PEFT: what is said of the names that a module's name ends in. Patterns that are more than names are refused:
    a file that somebody made must not say how long it takes to read.
    """
    for pattern, value in patterns.items() if isinstance(patterns, Mapping) else ():
        plain = str(pattern).removeprefix("^").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", plain):
            raise refuse(ErrorCode.UNSUPPORTED, f"{file}: alpha_pattern {pattern!r} is more than a name")
        name = canonical(plain)
        if module == name or module.endswith(f".{name}"):
            return value
    return default


def _number(value: Any, file: Path, name: str) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good:
        raise _bad(file, f"{name} is {value!r}, not a number")
    return float(value)


def _bases(config: Mapping[str, Any]) -> list[str]:
    keys: Sequence[str] = ("base_model", "base_model_name_or_path", "source_model", "model")
    given = (config.get(key) for key in keys)
    return list(dict.fromkeys(name for name in given if isinstance(name, str) and name.strip()))


def _by(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


def _bad(path: Path, fault: str) -> Refused:
    return refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: {fault}".replace("\n", " "))
