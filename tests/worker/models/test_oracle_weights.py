"""Each family from checkpoints of any origin, quantized or not, alone and beside another row; bytes of its caches."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from shared.checkpoint import inspect
from shared.kv_layout import kv_layers, kv_room
from tests.oracles import checkpoints
from tests.oracles.layouts import LAYOUTS
from tests.worker.models.running import dequantized, logits_of, one_case_a_family
from worker.layers.batch import Batch, solo
from worker.models import DecoderModel, load_model

TOLERANCE = 1e-4

MIXED: dict[str, Any] = {
    "bits": 4,
    "group_size": 32,
    "mode": "affine",
    "lm_head": False,
    "model.embed_tokens": {"bits": 6},
    "model.layers.0.self_attn.o_proj": {"bits": 8},
    "model.layers.1.self_attn.kv_b_proj": {"bits": 8},
    "model.layers.0.self_attn.qkv_proj": {"bits": 5},
    "model.layers.0.mlp.gate_up_proj": {"mode": "mxfp8", "bits": 8},
    "model.layers.1.mlp.gate": {"bits": 8},
}
EXPERTS = {  # of one layer, by the names that a layout has for them
    "hub": [f"model.layers.1.mlp.experts.{number}.down_proj" for number in range(8)],
    "mlx": ["model.layers.1.mlp.switch_mlp.down_proj", "model.layers.1.mlp.experts.down_proj"],
}


@pytest.mark.parametrize("layout", ["fused", "mlx"])
@pytest.mark.parametrize("name", one_case_a_family())
def test_oracle_layouts_of_the_weights_give_the_same_model(name: str, layout: str, tmp_path: Path) -> None:
    expected = checkpoints.reference(name)
    tensors = LAYOUTS[layout](checkpoints.weights.build(*checkpoints.case(name)), checkpoints.case(name)[0])
    model = load_model(checkpoints.write_case(name, tmp_path, layout=layout)).model
    assert np.abs(logits_of(model, expected["input_ids"], [17]) - expected["logits"]).max() < TOLERANCE
    assert set(inspect_names(tmp_path)) == set(tensors)


def inspect_names(folder: Path) -> list[str]:
    tensors = mx.load(str(folder / "model.safetensors"))
    assert isinstance(tensors, dict)
    return list(tensors)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (name, layout)
        for name in one_case_a_family()
        for layout in ("hub", "mlx")
        if (name, layout) != ("gpt_oss", "hub")  # its experts are in mxfp4 there as it is
    ],
)
def test_oracle_quantized_families_give_what_their_multiplied_out_values_give(
    name: str, layout: str, tmp_path: Path
) -> None:
    ids = checkpoints.reference(name)["input_ids"]
    scheme = MIXED | {module: {"bits": 8} for module in EXPERTS[layout]}
    folder = checkpoints.write_case(name, tmp_path / "packed", quantize=scheme, layout=layout)
    packed, plain = load_model(folder), load_model(dequantized(folder, tmp_path / "plain"))
    for cuts in ([], [17], list(range(1, 64))):
        assert np.abs(logits_of(packed.model, ids, cuts) - logits_of(plain.model, ids, [])).max() < TOLERANCE
    assert packed.weights_bytes < 0.6 * plain.weights_bytes


@pytest.mark.parametrize("name", one_case_a_family())
def test_oracle_a_row_beside_another_computes_what_it_computes_alone(name: str, tmp_path: Path) -> None:
    model = load_model(checkpoints.write_case(name, tmp_path)).model
    ids = checkpoints.reference(name)["input_ids"]
    rows = [ids[:30], ids[::-1][:38].copy()]
    alone = [logits_of(model, row, []) for row in rows]
    steps = [(17, 9), (1, 26), (1, 1), (1, 1), (10, 1)]  # a row decodes beside one in prefill
    together = run_together(model, rows, steps)
    for found, expected in zip(together, alone, strict=True):
        assert np.abs(found - expected).max() < 2e-5
        assert np.array_equal(found.argmax(-1), expected.argmax(-1))


def run_together(
    model: DecoderModel, rows: list[np.ndarray], steps: list[tuple[int, ...]]
) -> list[np.ndarray]:
    """Logits of each row, run `steps` tokens of all rows at a time."""
    caches = [model.make_caches(len(row)) for row in rows]
    at = [0] * len(rows)
    found: list[list[np.ndarray]] = [[] for _ in rows]
    for lengths in steps:
        pieces = [row[begin : begin + n] for row, begin, n in zip(rows, at, lengths, strict=True)]
        hidden = model(Batch(mx.array(np.concatenate(pieces)), list(zip(caches, lengths, strict=True))))
        parts = np.split(np.array(model.head(hidden)), np.cumsum(lengths)[:-1])
        for number, part in enumerate(parts):
            found[number].append(part)
            at[number] += lengths[number]
    assert at == [len(row) for row in rows]
    return [np.concatenate(each) for each in found]


@pytest.mark.parametrize("name", one_case_a_family())
def test_oracle_caches_hold_what_the_layout_says(name: str, tmp_path: Path) -> None:
    folder = checkpoints.write_case(name, tmp_path)
    model, layers = load_model(folder).model, kv_layers(inspect(folder).config)
    caches = model.make_caches(300)
    for _ in range(3):
        mx.eval(model(solo(mx.ones(100, mx.int32), caches)))
    assert sum(cache.nbytes for cache in caches) == kv_room(layers, 300, 100, 4)


def test_oracle_latents_are_all_that_latent_attention_keeps(tmp_path: Path) -> None:
    config, _ = checkpoints.case("deepseek_v3")
    folder = checkpoints.write_case("deepseek_v3", tmp_path)
    numbers = sum(layer.token_values() for layer in kv_layers(inspect(folder).config))
    assert numbers == config["num_hidden_layers"] * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
