"""Loading: quantized layouts mean what they say, dtypes are chosen by device, and bad weights are named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy

from shared.errors import ErrorCode, Refused
from tests.oracles.checkpoints import case, reference, write_case
from tests.oracles.weights import shapes
from tests.worker.models.running import dequantized
from worker.layers.batch import solo
from worker.models import FAMILIES, LoadedModel, choose_dtype, load_model

CASE = "llama_biases"
LAYER = "model.layers.0.mlp.down_proj"


def logits_of(loaded: LoadedModel) -> np.ndarray:
    ids = mx.array(reference(CASE)["input_ids"])
    hidden = loaded.model(solo(ids, loaded.model.make_caches(ids.shape[0])))
    return np.array(loaded.model.head(hidden).astype(mx.float32))


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    change(tensors)
    safetensors.numpy.save_file(tensors, path, {"format": "pt"})


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def only(*modules: str, **scheme: Any) -> dict[str, Any]:
    """A quantization dict for these modules, every other switched off by name."""
    config, _ = case(CASE)
    every = [name.removesuffix(".weight") for name, shape in shapes(config).items() if len(shape) == 2]
    return {**scheme, **{module: False for module in every if module not in modules}}


SCHEMES = {
    **{
        f"affine {bits} bits, groups of {group}": {"bits": bits, "group_size": group, "mode": "affine"}
        for bits in (2, 3, 4, 5, 6, 8)
        for group in (32, 64)
    },
    "affine, groups of 128": only(LAYER, bits=4, group_size=128, mode="affine"),
    "mode left out": {"bits": 4, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "mxfp8": {"bits": 8, "group_size": 32, "mode": "mxfp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "mode": "nvfp4"},
    "overrides": {
        "bits": 4,
        "group_size": 32,
        "mode": "affine",
        LAYER: {"bits": 8},
        "model.layers.1.self_attn.q_proj": {"group_size": 64, "bits": 3},
        "model.layers.1.mlp.gate_proj": {"mode": "mxfp8", "bits": 8, "group_size": 32},
        "model.embed_tokens": {"bits": 6},
        "lm_head": False,
    },
}


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_weights_give_what_their_multiplied_out_values_give(name: str, tmp_path: Path) -> None:
    packed = load_model(write_case(CASE, tmp_path / "packed", quantize=SCHEMES[name]))
    plain = load_model(dequantized(tmp_path / "packed", tmp_path / "plain"))
    assert np.abs(logits_of(packed) - logits_of(plain)).max() < 1e-4
    assert packed.weights_bytes < plain.weights_bytes
    assert packed.quantization
    assert not plain.quantization


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_a_tied_head_uses_the_quantized_embedding(mode: str, tmp_path: Path) -> None:
    scheme = {"bits": 4, "group_size": 32, "mode": mode}
    packed = load_model(write_case("llama_tied", tmp_path / "packed", quantize=scheme))
    head = packed.model.head(mx.eye(64))
    rows = packed.model(solo(mx.array([5]), packed.model.make_caches()))
    table = mx.load(str(tmp_path / "packed" / "model.safetensors"))
    assert isinstance(table, dict)
    module = "model.embed_tokens"
    weight = mx.dequantize(
        table[f"{module}.weight"],
        table[f"{module}.scales"],
        table.get(f"{module}.biases"),
        group_size=32,
        bits=4,
        mode=mode,
        dtype=mx.float32,
    )
    assert np.abs(np.array(head.T) - np.array(weight)).max() < 1e-5
    assert rows.dtype == mx.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("quantize", [None, {"bits": 4, "group_size": 32, "mode": "affine"}])
def test_auto_is_float32_on_cpu_whatever_the_checkpoint_holds(
    dtype: str, quantize: dict[str, Any] | None, tmp_path: Path
) -> None:
    loaded = load_model(write_case(CASE, tmp_path / "low", dtype=dtype, quantize=quantize))
    exact = load_model(write_case(CASE, tmp_path / "exact", quantize=quantize))
    expected = mx.float32 if mx.default_device().type == mx.DeviceType.cpu else getattr(mx, dtype)
    assert loaded.dtype == expected
    assert loaded.checkpoint.config["dtype"] == dtype
    assert np.abs(logits_of(loaded) - logits_of(exact)).max() < 0.1
    assert logits_of(loaded).any()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_dtype_asked_for_is_what_runs(dtype: str, tmp_path: Path) -> None:
    loaded = load_model(write_case(CASE, tmp_path), dtype=dtype)
    ids = mx.array([1, 2, 3])
    caches = loaded.model.make_caches()
    hidden = loaded.model(solo(ids, caches))
    assert loaded.dtype == getattr(mx, dtype)
    assert {hidden.dtype, loaded.model.head(hidden).dtype, caches[0].arrays()[0].dtype} == {loaded.dtype}


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    loaded = load_model(write_case(CASE, tmp_path))
    with pytest.raises(Refused, match="float33") as caught:
        choose_dtype(loaded.checkpoint, "float33")
    assert caught.value.failure.code is ErrorCode.INVALID_REQUEST


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="a limit of the CPU backend")
def test_quantized_in_bfloat16_is_refused_on_cpu(tmp_path: Path) -> None:
    folder = write_case(CASE, tmp_path, quantize=PACKED)
    with pytest.raises(Refused, match="wrong text"):
        load_model(folder, dtype="bfloat16")
    assert load_model(folder, dtype="float16").dtype == mx.float16


def test_progress_counts_bytes_up_to_what_is_held(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    loaded = load_model(
        write_case(CASE, tmp_path, shards=3, dtype="float16"), on_progress=lambda *at: seen.append(at)
    )
    config, _ = case(CASE)
    held = sum(int(np.prod(shape)) for shape in shapes(config).values()) * loaded.dtype.size
    assert loaded.weights_bytes == held
    assert seen == sorted(seen)
    assert seen[-1] == (held, held)


def test_leftovers_of_old_exports_are_passed_over(tmp_path: Path) -> None:
    folder = write_case("llama_tied", tmp_path)

    def add(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    rewrite(folder, add)
    assert load_model(folder).weights_bytes > 0


def replace(name: str, value: np.ndarray | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        rewrite(folder, lambda tensors: tensors.pop(name) is None or _put(tensors, name, value))

    return change


def _put(tensors: dict[str, np.ndarray], name: str, value: np.ndarray | None) -> None:
    if value is not None:
        tensors[name] = value


def add(name: str, value: np.ndarray) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, lambda tensors: tensors.update({name: value}))


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: set_config(folder, **changes)


ONES = np.ones((3, 3), np.float32)
PACKED = {"bits": 4, "group_size": 32, "mode": "affine"}

FAULTS: dict[str, tuple[dict[str, Any] | None, Callable[[Path], None], str]] = {
    "missing": (None, replace(f"{LAYER}.weight", None), f"{LAYER}.weight is missing"),
    "missing bias": (None, replace(f"{LAYER}.bias", None), f"{LAYER}.bias is missing"),
    "wrong shape": (
        None,
        replace(f"{LAYER}.weight", ONES),
        rf"{LAYER}.weight has shape \[3, 3\], config.json asks for \[64, 128\]",
    ),
    "unexpected": (None, add("model.layers.9.x", ONES), "model.layers.9.x is not part of a llama model"),
    "unexpected, several": (None, config(num_hidden_layers=1), "and 15 more is not part of"),
    "scales without a scheme": (
        PACKED,
        config(quantization=..., quantization_config=...),
        "has scales, but config.json has no quantization entry",
    ),
    "scales where switched off": (
        PACKED,
        config(quantization={**PACKED, LAYER: False}),
        f"{LAYER} has scales, but config.json says it is not quantized",
    ),
    "scales missing": (PACKED, replace(f"{LAYER}.scales", None), f"{LAYER}.weight has shape"),
    "biases missing": (PACKED, replace(f"{LAYER}.biases", None), f"{LAYER}.biases is missing"),
    "other bits": (PACKED, config(quantization={**PACKED, "bits": 8}), "asks for"),
    "weights not packed": (
        PACKED,
        replace(f"{LAYER}.weight", np.ones((64, 16), np.float32)),
        f"{LAYER}.weight is mlx.core.float32, but quantized weights are uint32",
    ),
    "size a word": (None, config(hidden_size="big"), "config.json: Expected `int`"),
    "size missing": (None, config(vocab_size=...), "missing required field `vocab_size`"),
    "heads do not divide": (None, config(num_key_value_heads=3), "do not divide"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(fault: str, tmp_path: Path) -> None:
    quantize, change, message = FAULTS[fault]
    change(write_case(CASE, tmp_path, quantize=quantize))
    with pytest.raises(Refused, match=message) as caught:
        load_model(tmp_path)
    assert caught.value.failure.code is ErrorCode.BAD_CHECKPOINT
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "family": ({"model_type": "mamba9"}, "'mamba9' is not among the native ones .llama, mistral"),
    "rope": ({"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral'.*known are default, linear"),
    "activation": ({"hidden_act": "relu7"}, "hidden_act 'relu7'"),
    "mode": ({"quantization": {**PACKED, "mode": "trellis"}}, "mode 'trellis'"),
    "bits": ({"quantization": {**PACKED, "bits": 7}}, "7 bits and groups of 32"),
    "group": ({"quantization": {**PACKED, "mode": "nvfp4"}}, "nvfp4 with 4 bits and groups of 32"),
}


@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_supported_is_named_with_what_is(what: str, tmp_path: Path) -> None:
    changes, message = UNSUPPORTED[what]
    set_config(write_case(CASE, tmp_path, quantize=PACKED), **changes)
    with pytest.raises(Refused, match=message) as caught:
        load_model(tmp_path)
    assert caught.value.failure.code is ErrorCode.UNSUPPORTED


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear"}, "needs 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "parameters of rope_type 'linear' are wrong"),
        ({"rope_type": "linear", "factor": "x"}, "parameters of rope_type 'linear' are wrong"),
        ({"rope_type": "llama3", "factor": 8.0}, "needs 'low_freq_factor'"),
        (
            {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]},
            "short_factor has 1 entries, wanted 8",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.01}, "0 of 16 values"),
    ],
)
def test_wrong_rope_parameters_are_refused(rope: dict[str, Any], message: str, tmp_path: Path) -> None:
    set_config(write_case(CASE, tmp_path), rope_parameters=rope)
    with pytest.raises(Refused, match=message):
        load_model(tmp_path)


def test_every_family_of_the_table_has_an_oracle_case() -> None:
    from tests.oracles.checkpoints import names

    held = {case(name)[0]["model_type"] for name in names()}
    inside = {family for family in FAMILIES if f"{family}_text" in FAMILIES}
    assert held == set(FAMILIES) - inside
