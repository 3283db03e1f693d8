"""Weights of experts, of fused projections and of latent attention that do not fit are refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy

from shared.errors import ErrorCode, Refused
from tests.oracles.checkpoints import reference, write_case
from tests.worker.models.running import logits_of
from tests.worker.models.test_loading import rewrite, set_config
from worker.layers.batch import solo
from worker.models import load_model

Tensors = dict[str, np.ndarray]
ON_CPU = mx.default_device().type == mx.DeviceType.cpu
PACKED = {"bits": 4, "group_size": 32, "mode": "affine"}


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def changed(name: str, value: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, value)


MOE, ATTENTION = "model.layers.1.mlp", "model.layers.1.self_attn"
FLAT = np.ones((4, 64, 2, 8), np.uint8)
FAULTS: dict[str, tuple[str, str, Callable[[Tensors], None], str]] = {
    "an expert missing": (
        "glm4_moe",
        "hub",
        without(f"{MOE}.experts.5.up_proj.weight"),
        rf"tensor {MOE}.experts.5.up_proj.weight is missing",
    ),
    "an expert too many": (
        "glm4_moe",
        "hub",
        changed(f"{MOE}.experts.8.up_proj.weight", np.ones((32, 64), np.float32)),
        rf"tensor {MOE}.experts.8.up_proj.weight is not part of",
    ),
    "an expert of another shape": (
        "glm4_moe",
        "hub",
        changed(f"{MOE}.experts.5.up_proj.weight", np.ones((3, 64), np.float32)),
        rf"{MOE}.experts.5.up_proj.weight has shape \[3, 64\], that of expert 0 has \[32, 64\]",
    ),
    "a stack of other experts": (
        "glm4_moe",
        "mlx",
        changed(f"{MOE}.switch_mlp.up_proj.weight", np.ones((7, 32, 64), np.float32)),
        r"has shape \[7, 32, 64\], config.json asks for \[8, 32, 64\]",
    ),
    "no correction": (
        "deepseek_v3",
        "hub",
        without(f"{MOE}.gate.e_score_correction_bias"),
        "e_score_correction_bias is missing",
    ),
    "fused stacks without their other half": (
        "glm4_moe",
        "fused",
        without(f"{MOE}.experts.down_proj"),
        rf"tensor {MOE}.experts.down_proj is missing",
    ),
    "blocks without scales": (
        "gpt_oss",
        "hub",
        without(f"{MOE}.experts.gate_up_proj_scales"),
        "gate_up_proj_scales is missing",
    ),
    "blocks of another size": (
        "gpt_oss",
        "hub",
        changed(f"{MOE}.experts.gate_up_proj_blocks", FLAT),
        r"gate_up_proj_blocks is mlx.core.uint8 \[4, 64, 2, 8\], not blocks of 16 bytes",
    ),
    "latents of other heads": (
        "deepseek_v3",
        "hub",
        changed(f"{ATTENTION}.kv_b_proj.weight", np.ones((190, 64), np.float32)),
        "kv_b_proj.weight has 190 rows, config.json asks for 192",
    ),
    "a fused projection of other heads": (
        "phi3",
        "hub",
        changed(f"{ATTENTION}.qkv_proj.weight", np.ones((100, 64), np.float32)),
        "qkv_proj.weight has 100 rows, config.json asks for 128",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_named(fault: str, tmp_path: Path) -> None:
    name, layout, change, message = FAULTS[fault]
    rewrite(write_case(name, tmp_path, layout=layout), change)
    with pytest.raises(Refused, match=message) as caught:
        load_model(tmp_path)
    assert caught.value.failure.code is ErrorCode.BAD_CHECKPOINT
    assert "\n" not in str(caught.value)


def test_another_routing_is_refused(tmp_path: Path) -> None:
    set_config(write_case("deepseek_v3", tmp_path), scoring_func="softmax")
    with pytest.raises(Refused, match="scoring_func 'softmax' is not supported, only sigmoid"):
        load_model(tmp_path)


@pytest.mark.skipif(not ON_CPU, reason="a limit of mlx's CPU backend")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_plain_experts_in_16_bits_are_refused_where_mlx_cannot_run_them(dtype: str, tmp_path: Path) -> None:
    folder = write_case("qwen3_moe", tmp_path, dtype=dtype)
    with pytest.raises(Refused, match="runs experts that are not quantized in float32 only") as caught:
        load_model(folder, dtype=dtype)
    assert caught.value.failure.param == "dtype"
    assert load_model(folder).dtype == mx.float32


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v3"])
def test_quantized_experts_run_in_float16(name: str, tmp_path: Path) -> None:
    """Router and sums of products in the dtypes they should have, and close to float32."""
    folder = write_case(name, tmp_path, quantize=PACKED, layout="mlx")
    half, full = load_model(folder, dtype="float16").model, load_model(folder, dtype="float32").model
    ids = reference(name)["input_ids"]
    assert half(solo(mx.array(ids), half.make_caches())).dtype == mx.float16
    caches = half.make_caches()
    mx.eval(half(solo(mx.array(ids), caches)))
    assert {array.dtype for cache in caches for array in cache.arrays()} == {mx.float16}
    found, expected = logits_of(half, ids, []), logits_of(full, ids, [])
    assert np.median(np.abs(found - expected)) < 0.02
    assert np.mean(found.argmax(-1) == expected.argmax(-1)) > 0.8


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_that_guess_further_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    folder = write_case(name, tmp_path)
    extra: dict[str, Any] = {
        "model.layers.2.eh_proj.weight": np.ones((64, 128), np.float32),
        "model.layers.2.mlp.experts.0.up_proj.weight": np.ones((32, 64), np.float32),
    }
    rewrite(folder, lambda tensors: tensors.update(extra))
    expected = reference(name)
    found = logits_of(load_model(folder).model, expected["input_ids"], [])
    assert np.abs(found - expected["logits"]).max() < 1e-4
    assert set(extra) < set(safetensors.numpy.load_file(folder / "model.safetensors"))
