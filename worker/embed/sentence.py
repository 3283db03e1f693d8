"""What the files of sentence-transformers beside a model say: how hidden states become one vector, and prompts.

`modules.json` lists the steps behind the model (Pooling, Dense, Normalize) with the folders of their configs;
`config_sentence_transformers.json` has the prompts. A model without them is pooled as most of its kind are.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import ErrorCode, Refused, refuse
from shared.files import decode_json, read_regular

POOLING = ("cls", "mean", "max", "mean_sqrt_len", "last")
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_NAMES = {"mean_sqrt_len_tokens": "mean_sqrt_len", "lasttoken": "last"}
_ACTIVATIONS = ("Tanh", "Identity")


@dataclass(frozen=True)
class DenseSpec:
    """A projection behind pooling: its folder, its sizes, and what follows it."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Sentence:
    """How a text's hidden states become its vector. `pooling`: of `POOLING`; several stand side by side.

    `prompts`: by name, text that goes before each input; `default_prompt`: where none is asked for.
    """

    pooling: tuple[str, ...]
    normalize: bool = True
    dense: tuple[DenseSpec, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""


def read_sentence(path: Path, *, is_encoder: bool) -> Sentence:
    """Read the files of a model directory. Raises `Refused` (bad_checkpoint, unsupported)."""
    usual = ("mean",) if is_encoder else ("last",)
    prompts, default = _prompts(path)
    modules = _read(path / "modules.json")
    if modules is None:
        pooling = _pooling(path / "1_Pooling" / "config.json")
        return Sentence(pooling or usual, prompts=prompts, default_prompt=default)
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise _bad(path / "modules.json", "not a list of modules")
    pooling, dense, normalize = usual, [], False
    for module in modules:
        kind, folder = str(module.get("type")).rpartition(".")[2], path / str(module.get("path", ""))
        if not folder.resolve().is_relative_to(path.resolve()):
            raise _bad(path / "modules.json", f"names {module.get('path')!r}, which is not in this directory")
        if kind == "Pooling":
            pooling = _pooling(folder / "config.json") or usual
        elif kind == "Dense":
            dense.append(_dense(folder))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise _unsupported(path / "modules.json", f"module {kind} is not supported")
    return Sentence(pooling, normalize, tuple(dense), prompts, default)


def _pooling(file: Path) -> tuple[str, ...]:
    """The modes of a pooling config, in either spelling; () where it says none."""
    config = _object(file)
    if config.get("include_prompt") is False:
        raise _unsupported(file, "include_prompt false (a prompt that is not pooled) is not supported")
    mode = config.get("pooling_mode")
    given = mode if isinstance(mode, list) else [mode] if isinstance(mode, str) else []
    modes = [_NAMES.get(str(one), str(one)) for one in given] or [
        name for flag, name in _FLAGS.items() if config.get(flag)
    ]
    for one in modes:
        if one not in POOLING:
            raise _unsupported(file, f"pooling {one!r} is not supported; known are {', '.join(POOLING)}")
    return tuple(modes)


def _dense(folder: Path) -> DenseSpec:
    file = folder / "config.json"
    config = _object(file)
    sizes = config.get("in_features"), config.get("out_features")
    if not all(isinstance(size, int) and 0 < size < 1 << 20 for size in sizes):
        raise _bad(file, "in_features and out_features are not both sizes")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise _unsupported(file, f"activation_function {name} is not supported")
    return DenseSpec(
        folder, config["in_features"], config["out_features"], bool(config.get("bias", True)), name
    )


def _prompts(path: Path) -> tuple[dict[str, str], str]:
    file = path / "config_sentence_transformers.json"
    config = _object(file)
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise _bad(file, "prompts is not an object of texts")
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise _bad(file, f"default_prompt_name {default!r} is not one of its prompts")
    return prompts, default or ""


def _object(file: Path) -> dict[str, Any]:
    found = _read(file)
    if found is not None and not isinstance(found, dict):
        raise _bad(file, "not a JSON object")
    return found or {}


def _read(file: Path) -> Any:
    """None where there is no such file."""
    if not os.path.lexists(file):
        return None
    try:
        return decode_json(read_regular(file))
    except OSError as error:
        raise _bad(file, f"cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise _bad(file, f"not JSON ({error})") from None


def _bad(file: Path, fault: str) -> Refused:
    return refuse(ErrorCode.BAD_CHECKPOINT, f"{file}: {fault}; download the model again")


def _unsupported(file: Path, fault: str) -> Refused:
    return refuse(ErrorCode.UNSUPPORTED, f"{file}: {fault}")
