"""What a model directory holds, from `config.json` and the headers of its weights; no tensor is ever read.

`inspect` either describes the directory or refuses it in one line that names the file at fault. The parent
lists and sizes models with it, the worker checks a model with it before it maps the weights.
"""

import os
from pathlib import Path
from typing import Any

import msgspec

from shared import encoders, kv_layout, model_config
from shared.encoders import Kind
from shared.errors import ErrorCode, Refused, refuse
from shared.files import decode_json, open_regular, read_regular
from shared.tensor_headers import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Shard(msgspec.Struct, frozen=True):
    """One weights file: its name in the directory and its size on disk."""

    file: str
    num_bytes: int


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model directory. `config` is normalised (see `shared.model_config`).

    `weights_bytes`: payload of all tensors. `dtypes`: safetensors dtype name to payload bytes. `context`: 0
    if the config does not say. `eos_ids`: of config and generation config. `modalities`: text, image, audio.
    `kind`: what it was made for.
    """

    path: str
    model_type: str
    architectures: list[str]
    config: dict[str, Any]
    shards: list[Shard]
    dtypes: dict[str, int]
    weights_bytes: int
    quantization: str
    context: int
    eos_ids: list[int]
    modalities: list[str]
    warnings: list[str]
    kind: Kind = "chat"


def inspect(path: Path) -> Checkpoint:
    """Describe the model directory at `path`. Raises `Refused` (bad_checkpoint, unsupported)."""
    path = Path(path)
    config = read_config(path)
    if not _is_there(path / "tokenizer.json"):
        raise _bad(path, "no tokenizer.json; download it with the model, or convert the model's tokenizer")
    if entries := _kv_config(path):
        config["kv_config"] = entries
    warnings: list[str] = []
    tensors = _tensors(path, warnings)
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.num_bytes
    files = sorted({tensor.file for tensor in tensors.values()})
    find_fault = encoders.encoder_fault if encoders.is_encoder(config) else encoders.decoder_fault
    if fault := find_fault(config):
        raise refuse(ErrorCode.UNSUPPORTED, f"{path / 'config.json'}: {fault}")
    return Checkpoint(
        path=str(path),
        model_type=config["model_type"],
        architectures=[str(name) for name in config.get("architectures") or []],
        config=config,
        shards=[Shard(name, (path / name).stat().st_size) for name in files],
        dtypes=dtypes,
        weights_bytes=sum(dtypes.values()),
        quantization=quantization_label(config),
        context=_context(path, config),
        eos_ids=_eos_ids(path, config),
        modalities=_modalities(config),
        warnings=warnings,
        kind=encoders.kind_of(config, has_modules=_is_there(path / "modules.json")),
    )


def _context(path: Path, config: dict[str, Any]) -> int:
    """Of an encoder no more than `max_seq_length` of `sentence_bert_config.json`: it was trained for that."""
    if not encoders.is_encoder(config):
        context = config.get("max_position_embeddings", 0)
        return context if isinstance(context, int) else 0
    context, file = encoders.encoder_context(config), path / "sentence_bert_config.json"
    longest = _read_json(file).get("max_seq_length") if _is_there(file) else None
    return min(context, longest) if isinstance(longest, int) and longest > 0 else context


def _kv_config(path: Path) -> list[dict[str, Any]]:
    """The entries of `kv_config.json`, where there is one: how each layer's cache is to be quantized."""
    file = path / "kv_config.json"
    if not _is_there(file):
        return []
    try:
        entries: list[dict[str, Any]] = decode_json(read_regular(file), list[dict[str, Any]])
        kv_layout.quantized(kv_layout.kv_layers(read_config(path)), "config", per_layer=entries)
    except ValueError as error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{file}: {error}; mend it or remove it") from None
    return entries


def tensors_of(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """Every tensor of the checkpoint by name; reads the headers again."""
    found: dict[str, TensorInfo] = {}
    for shard in checkpoint.shards:
        found.update(read_header(Path(checkpoint.path) / shard.file))
    return found


def kv_bytes_per_token(checkpoint: Checkpoint, elem_bytes: float = 2) -> int:
    """Bytes one more token costs while it is inside every window; see `kv_bytes` for the cap."""
    layers = kv_layout.kv_layers(checkpoint.config)
    return kv_layout.kv_bytes(layers, 1, elem_bytes) - kv_layout.kv_bytes(layers, 0, elem_bytes)


def kv_bytes(checkpoint: Checkpoint, tokens: int, elem_bytes: float = 2) -> int:
    """Bytes of KV for `tokens` tokens, sliding layers capped at their window."""
    return kv_layout.kv_bytes(kv_layout.kv_layers(checkpoint.config), tokens, elem_bytes)


def quantization_label(config: dict[str, Any]) -> str:
    """`affine 4-bit group 32`, `affine 4/8-bit group 32` where modules differ, `` without quantization."""
    scheme = config.get("quantization")
    if not scheme:
        return ""
    bits = {scheme["bits"]} | {
        one["bits"] for one in scheme.values() if isinstance(one, dict) and "bits" in one
    }
    shown = "/".join(str(one) for one in sorted(bits))
    group = scheme.get("group_size")
    return f"{scheme.get('mode', 'affine')} {shown}-bit" + (f" group {group}" if group else "")


def read_config(path: Path) -> dict[str, Any]:
    """The normalised `config.json` of a model directory. Raises `Refused` (bad_checkpoint, unsupported)."""
    if not path.exists():
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: no such directory")
    if not path.is_dir():
        hint = f"; `mlxd import {path.name}` converts it" if path.suffix == ".gguf" else ""
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: a file, not a model directory{hint}")
    if not os.path.lexists(path / "config.json"):
        raise _bad(path, "no config.json; this is not a model directory")
    raw = _read_json(path / "config.json")
    family = raw.get("model_type")
    if not isinstance(family, str) or not family:
        raise _bad(path / "config.json", "no model_type, so the family of the model is unknown")
    try:
        return model_config.normalise(raw)
    except ValueError as error:
        code = ErrorCode.UNSUPPORTED if "quantized with" in str(error) else ErrorCode.BAD_CHECKPOINT
        raise refuse(code, f"{path / 'config.json'}: {error}") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = decode_json(read_regular(path))
    except ValueError as error:
        raise _bad(path, f"not JSON ({error})") from None
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from None
    if not isinstance(found, dict):
        raise _bad(path, "not a JSON object")
    return found


def _is_there(path: Path) -> bool:
    """False without such a file. Raises `Refused` where something else is in its place."""
    if not os.path.lexists(path):
        return False
    try:
        open_regular(path).close()
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from None
    return True


def _tensors(path: Path, warnings: list[str]) -> dict[str, TensorInfo]:
    if os.path.lexists(path / INDEX):
        tensors = _indexed(path, warnings)
    elif os.path.lexists(path / SINGLE):
        tensors = read_header(path / SINGLE)
    else:
        files = sorted(path.glob("model*.safetensors"))
        if not files:
            raise _no_weights(path)
        tensors = {}
        for file in files:
            tensors.update(read_header(file))
    if not tensors:
        raise _bad(path, "the weight files hold no tensors; download the model again")
    return tensors


def _indexed(path: Path, warnings: list[str]) -> dict[str, TensorInfo]:
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise _bad(path / INDEX, "no weight_map from tensor names to files")
    files = sorted(set(weight_map.values()))
    outside = next((file for file in files if "/" in file or "\\" in file or file in ("", ".", "..")), None)
    if outside is not None:
        raise _bad(path / INDEX, f"names {outside!r}, which is not a file of this directory")
    missing = [file for file in files if not (path / file).is_file()]
    if missing:
        if (path / SINGLE).is_file():
            # An index left over from before a conversion, beside the file that replaced the shards.
            single = read_header(path / SINGLE)
            if len(missing) == len(files) or weight_map.keys() <= single.keys():
                warnings.append(
                    f"{INDEX} names files that are not here ({missing[0]}); {SINGLE} is used alone"
                )
                return single
        _is_there(path / missing[0])  # or says what is in its place
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _bad(path, f"{missing[0]}{more} is missing, which {INDEX} names; download the model again")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors.update(read_header(path / file))
    absent = next((name for name, file in weight_map.items() if name not in tensors), None)
    if absent is not None:
        raise _bad(path / weight_map[absent], f"tensor {absent} is missing, which {INDEX} puts there")
    return tensors


def _no_weights(path: Path) -> Refused:
    for pattern, advice in (
        ("*.gguf", "`mlxd import` converts GGUF files"),
        ("pytorch_model*.bin", "PyTorch files are not read; take a safetensors version of the model"),
        ("*.safetensors", "weights are looked for in model*.safetensors"),
    ):
        if found := sorted(path.glob(pattern)):
            return _bad(path, f"no model.safetensors, only {found[0].name}; {advice}")
    return _bad(path, "no weights (model.safetensors or shards with an index)")


def _eos_ids(path: Path, config: dict[str, Any]) -> list[int]:
    ids = set(config["eos_token_id"])
    generation = path / "generation_config.json"
    if os.path.lexists(generation):
        try:
            ids.update(model_config.token_ids(_read_json(generation).get("eos_token_id")))
        except ValueError as error:
            raise _bad(generation, str(error)) from None
    return sorted(ids)


def _modalities(config: dict[str, Any]) -> list[str]:
    return ["text"] + [
        kind for kind, key in (("image", "vision_config"), ("audio", "audio_config")) if key in config
    ]


def _bad(path: Path, fault: str) -> Refused:
    return refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: {fault}")
