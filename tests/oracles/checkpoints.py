"""Oracle cases as complete model directories, for every test that wants a real (tiny) model.

`write_case("llama_tied", tmp_path / "model")` gives a directory that loads; `reference(name)` what Hugging
Face transformers computes with it. A case is a folder of `cases/`: `case.json` (seed and config, in the
spelling of transformers 5) and `reference.safetensors`, made by `tests/oracles/make.py`.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tests.oracles import weights
from tests.oracles.layouts import LAYOUTS, wrapped

CASES = Path(__file__).with_name("cases")
FOREIGN = Path(__file__).with_name("foreign")
"""Cases of families that are not ours, for providers."""

Config = dict[str, Any]

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
]
EOS_ID = 2
VOCAB_SIZE = 272  # specials, 256 bytes, 8 merges

MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("a", "n"), ("i", "n"), ("e", "r"), ("o", "u"), ("an", "d")]

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def names() -> list[str]:
    """Every case of our families, in order."""
    return _names(CASES)


def foreign_names() -> list[str]:
    """Every case of other families, in order."""
    return _names(FOREIGN)


def _names(root: Path) -> list[str]:
    return sorted(folder.name for folder in root.iterdir() if (folder / "case.json").is_file())


def _folder(name: str) -> Path:
    return next(root / name for root in (CASES, FOREIGN) if (root / name).is_dir())


def case(name: str) -> tuple[Config, int]:
    """The config of a case and the seed of its weights."""
    stored = json.loads((_folder(name) / "case.json").read_text())
    return stored["config"], stored["seed"]


def reference(name: str) -> dict[str, NDArray[Any]]:
    """`input_ids` [L], `logits` [L, V] of one pass, `greedy_ids` [16], `greedy_margin` [16] (top 1 - top 2)."""
    return safetensors.numpy.load_file(_folder(name) / "reference.safetensors")


def write_case(name: str, folder: Path, **how: Any) -> Path:
    """Write case `name` as a model directory, as `write_model` does; gives `folder`."""
    return write_model(*case(name), folder, **how)


def write_model(
    config: Config,
    seed: int,
    folder: Path,
    *,
    quantize: dict[str, Any] | None = None,
    dtype: str = "float32",
    shards: int = 1,
    dialect: str = "modern",
    layout: str = "hub",
    inside: str = "",
) -> Path:
    """Write a model of this config with the weights of `seed`; gives `folder`.

    `quantize`: an MLX quantization dict, per-module overrides included. `dtype`: float32, float16 or bfloat16,
    of everything not packed. `dialect`: "modern" (transformers 5) or "legacy" spelling of config.json.
    `layout`: of the weights, see `tests.oracles.layouts`. `inside`: the `model_type` of a multimodal model around it.
    """
    tensors = LAYOUTS[layout](dict(weights.build(config, seed)), config)
    config = {**config, "dtype": dtype}
    if inside:
        tensors = wrapped(tensors, layout)
    if any(name.endswith("_blocks") for name in tensors):
        config["quantization_config"] = {"quant_method": "mxfp4"}
    if quantize is not None:
        tensors = quantized(tensors, quantize)
        config["quantization"] = config["quantization_config"] = quantize
    folder.mkdir(parents=True, exist_ok=True)
    _write_weights(folder, tensors, dtype, shards)
    config = legacy(config) if dialect == "legacy" else config
    if inside:
        outer = {key: config.pop(key) for key in ("quantization", "quantization_config") if key in config}
        config = {"model_type": inside, "text_config": config, "vision_config": {"hidden_size": 8}, **outer}
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json", {"eos_token_id": EOS_ID, "bos_token_id": 1, "pad_token_id": 0}
    )
    write_tokenizer(folder)
    return folder


def legacy(config: Config) -> Config:
    """The same config as transformers 4 spelled it."""
    config = copy.deepcopy(config)
    config["torch_dtype"] = config.pop("dtype", "float32")
    if own := config.pop("per_layer_config", None):
        sizes = next(iter(own.values()))
        config["global_head_dim"] = sizes["head_dim"]
        if "num_key_value_heads" in sizes:
            config["num_global_key_value_heads"] = sizes["num_key_value_heads"]
    if config["model_type"].startswith("gemma4"):
        return config
    rope = config.pop("rope_parameters")
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
    elif "linear_attention" in config.get("layer_types", []):
        config["full_attention_interval"] = config.pop("layer_types").index("full_attention") + 1
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


def tokens() -> list[str]:
    """The vocabulary, by id."""
    return [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in MERGES)]


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of `VOCAB_SIZE` tokens with ChatML specials, its config and its chat template."""
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens())}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


# ---------------------------------------------------------------- tensors

Arrays = dict[str, NDArray[Any]]


_STACKS = (".switch_mlp.", ".switch_glu.", ".experts.", ".embed_q", ".unembed_out")


def quantized(plain: Arrays, scheme: dict[str, Any]) -> Arrays:
    """Every matrix by MLX's quantizer, as the quantization dict `scheme` says; needs mlx."""
    import mlx.core as mx

    out: Arrays = {}
    for name, value in plain.items():
        module, _, leaf = name.rpartition(".")
        override = scheme.get(module)
        how = {**scheme, **(override or {})}
        is_matrix = value.ndim == 2 or (value.ndim == 3 and any(one in module for one in _STACKS))
        if leaf != "weight" or not is_matrix or override is False or value.shape[-1] % how["group_size"]:
            out[name] = value
            continue
        parts = mx.quantize(mx.array(value), how["group_size"], how["bits"], how.get("mode", "affine"))
        for leaf, part in zip(("weight", "scales", "biases"), parts, strict=False):
            out[f"{module}.{leaf}"] = np.array(part)
    return out


def _write_weights(folder: Path, tensors: Arrays, dtype: str, shards: int) -> None:
    if shards == 1:
        _save(folder / "model.safetensors", tensors, dtype)
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: one for i, (name, one) in enumerate(tensors.items()) if i % shards == number}
        _save(folder / file, part, dtype)
        weight_map.update(dict.fromkeys(part, file))
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _save(path: Path, tensors: Arrays, dtype: str) -> None:
    """Write float32 arrays as `dtype`, others as they are. numpy has no bfloat16, so mlx writes that."""
    if dtype == "bfloat16":
        import mlx.core as mx

        floats = {k: mx.array(v).astype(mx.bfloat16) for k, v in tensors.items() if v.dtype == np.float32}
        others = {k: mx.array(v) for k, v in tensors.items() if v.dtype != np.float32}
        mx.save_safetensors(str(path), {**floats, **others}, {"format": "pt"})
        return
    cast = {k: v.astype(dtype) if v.dtype == np.float32 else v for k, v in tensors.items()}
    safetensors.numpy.save_file(cast, path, {"format": "pt"})


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
