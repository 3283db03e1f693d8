"""Adapters as files, for tests: random ones as mlx-lm and PEFT write them, and models with them in their weights."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import safetensors.numpy

Pair = tuple[np.ndarray, np.ndarray]
"""A [in, rank] and B [rank, out]."""

QV = ("self_attn.q_proj", "self_attn.v_proj")
ALL = (
    *(f"self_attn.{one}_proj" for one in "qkvo"),
    *(f"mlp.{one}_proj" for one in ("gate", "up", "down")),
)


def weights_of(model: Path) -> dict[str, np.ndarray]:
    """Every tensor of a model directory of one file."""
    return safetensors.numpy.load_file(model / "model.safetensors")


def random_pairs(
    model: Path, leaves: Sequence[str] = QV, *, rank: int = 4, seed: int = 0, size: float = 0.3
) -> dict[str, Pair]:
    """For every module of `model` whose name ends in one of `leaves`."""
    rng = np.random.default_rng(seed)
    found: dict[str, Pair] = {}
    for name, weight in sorted(weights_of(model).items()):
        module = name.removesuffix(".weight")
        if module != name and module.endswith(tuple(leaves)):
            out, ins = weight.shape
            found[module] = (
                rng.normal(0, size, (ins, rank)).astype(np.float32),
                rng.normal(0, size, (rank, out)).astype(np.float32),
            )
    assert found
    return found


def write_mlx(
    folder: Path,
    pairs: Mapping[str, Pair],
    *,
    scale: float = 0.5,
    magnitudes: Mapping[str, np.ndarray] | None = None,
    **config: Any,
) -> Path:
    """In mlx-lm's layout; with `magnitudes` a DoRA."""
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"{module}.lora_a"], tensors[f"{module}.lora_b"] = a, b
    tensors |= {f"{module}.m": m for module, m in (magnitudes or {}).items()}
    rank = next(iter(pairs.values()))[0].shape[1]
    kind = "dora" if magnitudes else "lora"
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0}
    return write_raw(
        folder,
        "adapters.safetensors",
        tensors,
        {"fine_tune_type": kind, "num_layers": -1, "lora_parameters": parameters, **config},
    )


def write_peft(
    folder: Path, pairs: Mapping[str, Pair], *, alpha: float, prefix: str = "base_model.model.", **config: Any
) -> Path:
    """In PEFT's layout: transposed, under its prefix."""
    tensors = {}
    for module, (a, b) in pairs.items():
        tensors[f"{prefix}{module}.lora_A.weight"] = np.ascontiguousarray(a.T)
        tensors[f"{prefix}{module}.lora_B.weight"] = np.ascontiguousarray(b.T)
    rank = next(iter(pairs.values()))[0].shape[1]
    given = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    return write_raw(folder, "adapter_model.safetensors", tensors, given)


def write_raw(folder: Path, name: str, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> Path:
    """Whatever it is."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(dict(tensors), folder / name)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def adapted(model: Path, out: Path, added: Mapping[str, np.ndarray]) -> Path:
    """The model with these matrices [out, in] added to its weights."""
    shutil.copytree(model, out)
    tensors = weights_of(model)
    for module, matrix in added.items():
        tensors[f"{module}.weight"] = (tensors[f"{module}.weight"].astype(np.float64) + matrix).astype(
            np.float32
        )
    safetensors.numpy.save_file(tensors, out / "model.safetensors")
    return out


def product(pair: Pair, scale: float) -> np.ndarray:
    """scale (A B)^T."""
    a, b = pair
    return scale * (a.astype(np.float64) @ b.astype(np.float64)).T


def lengths(matrix: np.ndarray) -> np.ndarray:
    """Of the rows."""
    return np.asarray(np.linalg.norm(matrix, axis=1))


def same(a: mx.array | np.ndarray, b: mx.array | np.ndarray) -> float:
    """The greatest difference."""
    return float(np.abs(np.array(a) - np.array(b)).max())
