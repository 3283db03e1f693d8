"""Running a model in tests: logits of a prompt however it is cut, greedy text, and a model multiplied out."""

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np

from tests.oracles import checkpoints
from worker.layers.batch import solo
from worker.models import DecoderModel


def logits_of(model: DecoderModel, ids: np.ndarray, cuts: list[int]) -> np.ndarray:
    """Logits [L, V] of all of `ids`, run in pieces that end at `cuts`."""
    caches = model.make_caches(len(ids))
    pieces = np.split(ids, [cut for cut in cuts if cut < len(ids)])
    return np.array(mx.concatenate([model.head(model(solo(mx.array(piece), caches))) for piece in pieces]))


def greedy_of(model: DecoderModel, ids: np.ndarray, count: int) -> list[int]:
    """The `count` likeliest tokens after `ids`, one by one."""
    caches = model.make_caches(len(ids))
    tokens, found = mx.array(ids), []
    for _ in range(count):
        last = model.head(model(solo(tokens, caches))[-1:])
        tokens = mx.argmax(last, axis=-1).astype(mx.int32)
        found.append(int(tokens.item()))
    return found


def one_case_a_family() -> list[str]:
    """The first case of each `model_type`, with experts and without."""
    first: dict[tuple[str, bool], str] = {}
    for name in checkpoints.names():
        config = checkpoints.case(name)[0]
        first.setdefault((config["model_type"], bool(config.get("enable_moe_block"))), name)
    return sorted(first.values())


def dequantized(folder: Path, out: Path) -> Path:
    """The model of `folder` with plain float32 weights, multiplied out by mlx, in `out`."""
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text())
    scheme = config.pop("quantization")
    del config["quantization_config"]
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    plain = {}
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in ("scales", "biases"):
            continue
        if f"{module}.scales" in tensors and leaf == "weight":
            how = {**scheme, **(scheme.get(module) or {})}
            value = mx.dequantize(
                value,
                tensors[f"{module}.scales"],
                tensors.get(f"{module}.biases"),
                group_size=how["group_size"],
                bits=how["bits"],
                mode=how.get("mode", "affine"),
                dtype=mx.float32,
            )
        plain[name] = value
    mx.save_safetensors(str(out / "model.safetensors"), plain)
    (out / "config.json").write_text(json.dumps(config))
    return out
