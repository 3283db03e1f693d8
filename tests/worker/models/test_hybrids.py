"""Gemma 3 and 4 and Qwen 3.5: inside multimodal models, in 16 bits, what their caches hold, what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shared.checkpoint import inspect
from shared.errors import Refused
from shared.kv_layout import kv_bytes, kv_layers, kv_room
from tests.oracles import checkpoints
from tests.worker.models.running import dequantized, logits_of
from tests.worker.models.test_loading import rewrite, set_config
from worker.layers.batch import solo
from worker.models import load_model

TOLERANCE = 1e-4
CASES = ["gemma3", "gemma4_e", "gemma4_moe", "gemma4_unified", "qwen3_5", "qwen3_5_moe"]
HYBRID = ["qwen3_5", "qwen3_5_moe"]
WINDOW = 12


def outer(name: str) -> str:
    """The multimodal model around the text model of a case."""
    return str(checkpoints.case(name)[0]["model_type"]).removesuffix("_text")


@pytest.mark.parametrize("layout", ["fused", "mlx"])
@pytest.mark.parametrize("name", CASES)
def test_oracle_text_inside_a_multimodal_model_is_that_of_transformers(
    name: str, layout: str, tmp_path: Path
) -> None:
    expected = checkpoints.reference(name)
    folder = checkpoints.write_case(name, tmp_path, layout=layout, inside=outer(name))
    raw = json.loads((folder / "config.json").read_text())
    assert raw["model_type"] == outer(name)
    assert "hidden_size" not in raw
    loaded = load_model(folder)
    found = logits_of(loaded.model, expected["input_ids"], [17])
    assert np.abs(found - expected["logits"]).max() < TOLERANCE
    own = ("model.language_model.", "language_model.", "lm_head.")
    others = [key for key in _tensors(folder) if not key.startswith(own)]
    assert len(others) == (6 if name in HYBRID else 5)
    text = checkpoints.write_case(name, tmp_path / "text", layout=layout)
    assert loaded.weights_bytes == load_model(text).weights_bytes
    assert kv_layers(inspect(folder).config) == kv_layers(inspect(text).config)


def _tensors(folder: Path) -> dict[str, mx.array]:
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    return tensors


@pytest.mark.parametrize("name", ["gemma4_moe", "qwen3_5"])
def test_what_config_says_of_modules_holds_under_the_names_of_a_multimodal_model(
    name: str, tmp_path: Path
) -> None:
    scheme: dict[str, Any] = {
        "bits": 4,
        "group_size": 32,
        "mode": "affine",
        "language_model.model.embed_tokens": {"bits": 6},
        "language_model.model.layers.0.mlp.gate_proj": {"bits": 8},
        "language_model.model.layers.1.self_attn.o_proj": False,
        "language_model.model.layers.1.mlp.up_proj": {"mode": "mxfp8", "bits": 8},
    }
    folder = checkpoints.write_case(
        name, tmp_path / "packed", layout="mlx", inside=outer(name), quantize=scheme
    )
    ids = checkpoints.reference(name)["input_ids"]
    packed, plain = load_model(folder), load_model(dequantized(folder, tmp_path / "plain"))
    found, expected = logits_of(packed.model, ids, [17]), logits_of(plain.model, ids, [])
    assert np.abs(found - expected).max() < TOLERANCE
    assert packed.weights_bytes < 0.7 * plain.weights_bytes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4_e", "gemma4_unified", "qwen3_5"])
def test_a_model_in_16_bits_stays_in_16_bits_and_near(name: str, dtype: str, tmp_path: Path) -> None:
    folder = checkpoints.write_case(name, tmp_path, dtype=dtype)
    half, full = load_model(folder, dtype=dtype), load_model(folder, dtype="float32")
    ids = checkpoints.reference(name)["input_ids"]
    caches = half.model.make_caches(len(ids))
    assert half.model(solo(mx.array(ids), caches)).dtype == half.dtype
    mx.eval(half.model(solo(mx.array(ids[:1]), caches)))
    held = {array.dtype for cache in caches for array in cache.arrays()}
    assert held == ({half.dtype, mx.float32} if name == "qwen3_5" else {half.dtype})
    assert sum(cache.nbytes for cache in caches) == kv_room(kv_layers(half.checkpoint.config), 41, 40, 2)
    logits = half.model.head(half.model(solo(mx.array(ids), half.model.make_caches()))).astype(mx.float32)
    expected = logits_of(full.model, ids, [])
    assert np.median(np.abs(np.array(logits) - expected)) < (0.004 if dtype == "float16" else 0.03)


@pytest.mark.parametrize("tokens", [WINDOW - 1, WINDOW, WINDOW + 1, 300])
@pytest.mark.parametrize("name", CASES)
def test_caches_hold_what_the_layout_says_below_at_and_above_the_window(
    name: str, tokens: int, tmp_path: Path
) -> None:
    folder = checkpoints.write_case(name, tmp_path)
    model, layers = load_model(folder).model, kv_layers(inspect(folder).config)
    caches = model.make_caches()
    for begin in range(0, tokens, 50):
        mx.eval(model(solo(mx.ones(min(50, tokens - begin), mx.int32), caches)))
    assert sum(cache.nbytes for cache in caches) == kv_room(layers, tokens, 50, 4)
    for cache in caches:
        cache.cut()
    per_token = {layer.window or 0: 0 for layer in layers}
    for layer in layers:
        per_token[layer.window] += layer.token_values() * 4
    fixed = sum(layer.fixed_bytes(4) for layer in layers)
    assert per_token.get(WINDOW, 0) > 0 or fixed > 0
    seen = min(tokens, WINDOW)
    assert kv_bytes(layers, tokens, 4) == per_token[0] * tokens + per_token.get(WINDOW, 0) * seen + fixed


def test_layers_that_use_the_keys_of_others_have_no_cache(tmp_path: Path) -> None:
    folder = checkpoints.write_case("gemma4_e", tmp_path)
    layers = kv_layers(inspect(folder).config)
    assert [(layer.num_kv_heads, layer.head_dim, layer.window) for layer in layers] == [
        (2, 16, WINDOW),
        (2, 32, 0),
        (2, 16, WINDOW),
        (2, 32, 0),
    ]
    assert len(load_model(folder).model.make_caches()) == 4


def test_full_layers_of_gemma_4_have_their_own_heads(tmp_path: Path) -> None:
    layers = kv_layers(inspect(checkpoints.write_case("gemma4_moe", tmp_path)).config)
    sizes = [(layer.num_kv_heads, layer.head_dim, layer.window) for layer in layers]
    assert sizes == 2 * [(2, 16, WINDOW), (1, 32, 0)]


@pytest.mark.parametrize("name", HYBRID)
def test_a_delta_net_keeps_a_state_that_does_not_grow(name: str, tmp_path: Path) -> None:
    model = load_model(checkpoints.write_case(name, tmp_path)).model
    caches = model.make_caches()
    held = []
    for _ in range(3):
        mx.eval(model(solo(mx.ones(100, mx.int32), caches)))
        held.append(caches[0].nbytes)
        assert caches[0].offset == caches[2].offset
    channels = 2 * 2 * 16 + 4 * 32
    assert held == 3 * [4 * (3 * channels + 4 * 32 * 16)]
    assert [array.dtype for array in caches[0].arrays()] == [mx.float32, mx.float32]


@pytest.mark.parametrize("name", HYBRID)
def test_a_prompt_of_several_chunks_is_the_same_however_it_is_cut(name: str, tmp_path: Path) -> None:
    model = load_model(checkpoints.write_case(name, tmp_path)).model
    ids = np.random.default_rng(3).integers(0, 272, 300).astype(np.int32)
    whole = logits_of(model, ids, [])
    for cuts in ([64], [1, 65, 66, 129], [100, 163, 164, 250], list(range(1, 300))):
        assert np.abs(logits_of(model, ids, cuts) - whole).max() < TOLERANCE


def test_first_exports_of_gemma_4_with_keys_nobody_uses_load(tmp_path: Path) -> None:
    folder = checkpoints.write_case("gemma4_e", tmp_path)
    unused = {
        f"model.layers.5.self_attn.{name}.weight": np.ones(shape, np.float32)
        for name, shape in (("k_proj", (64, 64)), ("v_proj", (64, 64)), ("k_norm", (32,)))
    }
    rewrite(folder, lambda tensors: tensors.update(unused))
    expected = checkpoints.reference("gemma4_e")
    found = logits_of(load_model(folder).model, expected["input_ids"], [])
    assert np.abs(found - expected["logits"]).max() < TOLERANCE


Change = Callable[[dict[str, np.ndarray]], None]


def with_shape(name: str, *shape: int) -> Change:
    return lambda tensors: tensors.__setitem__(name, np.ones(shape, np.float32))


FAULTS: dict[str, tuple[str, dict[str, Any], Change | None, str]] = {
    "gemma for embeddings": (
        "gemma3",
        {"use_bidirectional_attention": True},
        None,
        "use_bidirectional_attention is for embeddings",
    ),
    "gemma 4 that looks ahead": (
        "gemma4_unified",
        {"use_bidirectional_attention": "all"},
        None,
        "use_bidirectional_attention 'all' is for embeddings",
    ),
    "no donor": (
        "gemma4_e",
        {"num_kv_shared_layers": 5},
        None,
        "with num_kv_shared_layers 5 no layer of full_attention has keys of its own",
    ),
    "heads of several sizes": (
        "gemma4_e",
        {"per_layer_config": {"1": {"head_dim": 32}}},
        None,
        "layers of full_attention have heads of several sizes",
    ),
    "heads that do not divide": (
        "gemma4_unified",
        {"num_key_value_heads": 3},
        None,
        "4 attention heads do not divide into 3 key-value heads",
    ),
    "no rope of a kind": (
        "gemma4_unified",
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        None,
        "no rope_parameters for layers of sliding_attention",
    ),
    "a layer number that is none": (
        "gemma4_e",
        {"per_layer_config": {"full_attention": {"head_dim": 32}}},
        None,
        "per_layer_config has the keys full_attention, not numbers of layers",
    ),
    "another gate": ("qwen3_5", {"output_gate_type": "sigmoid"}, None, "output_gate_type 'sigmoid'"),
    "value heads without a key head": (
        "qwen3_5",
        {"linear_num_value_heads": 3},
        None,
        "linear_num_value_heads 3 is no multiple of linear_num_key_heads 2",
    ),
    "a convolution of other channels": (
        "qwen3_5",
        {},
        with_shape("model.layers.1.linear_attn.conv1d.weight", 100, 1, 4),
        r"conv1d.weight has shape \[100, 1, 4\], config.json asks for \[192, 1, 4\]",
    ),
    "no scale of a layer": (
        "gemma4_unified",
        {},
        lambda tensors: tensors.__delitem__("model.layers.2.layer_scalar"),
        "tensor model.layers.2.layer_scalar is missing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_served_is_named(fault: str, tmp_path: Path) -> None:
    name, changes, change, message = FAULTS[fault]
    folder = checkpoints.write_case(name, tmp_path)
    set_config(folder, **changes)
    if change is not None:
        rewrite(folder, change)
    with pytest.raises(Refused, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
