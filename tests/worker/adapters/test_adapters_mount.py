"""What a mounted adapter makes of a model, against dense weights; and that a bad one leaves the model untouched."""

import json
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy

from shared.errors import ErrorCode, Refused
from tests.adapters import (
    ALL,
    QV,
    adapted,
    lengths,
    product,
    random_pairs,
    same,
    weights_of,
    write_mlx,
    write_peft,
    write_raw,
)
from tests.oracles.checkpoints import reference, write_case
from tests.worker.models.running import dequantized, logits_of
from worker.adapters.mount import Adapters
from worker.models import LoadedModel, load_model

Q8 = {"group_size": 32, "bits": 8, "mode": "affine"}


def opened(folder: Path) -> tuple[LoadedModel, Adapters]:
    loaded = load_model(folder)
    return loaded, Adapters(loaded.linears, loaded.parts, loaded.dtype, "m")


def logits(
    loaded: LoadedModel, held: Adapters | None = None, stack: tuple[str, ...] = (), case: str = "llama_tied"
):
    if held is not None:
        held.selection.choose([(stack, 1)])
    return logits_of(loaded.model, reference(case)["input_ids"], [1 << 30])


def dense_of(folder: Path) -> np.ndarray:
    return logits(load_model(folder))


@pytest.mark.parametrize(
    ("case", "leaves"),
    [
        ("llama_tied", ALL),
        ("llama_biases", ALL),
        ("qwen3", QV),
        ("phi3", ("self_attn.qkv_proj", "mlp.gate_up_proj", "self_attn.o_proj")),
        ("gemma3", ALL),
        ("gemma4_e", ("per_layer_input_gate", "per_layer_projection", "self_attn.q_proj")),
        ("qwen3_5", ("in_proj_qkv", "in_proj_z", "out_proj", "mlp.up_proj")),
        ("glm4_moe", ("self_attn.q_proj", "shared_experts.up_proj")),
    ],
)
def test_an_adapter_is_what_dense_weights_with_it_are(
    case: str, leaves: tuple[str, ...], tmp_path: Path
) -> None:
    model = write_case(case, tmp_path / "model")
    pairs = random_pairs(model, leaves, size=0.15)
    whole = adapted(model, tmp_path / "dense", {name: product(pair, 0.5) for name, pair in pairs.items()})
    loaded, held = opened(model)
    base = logits(loaded, case=case)
    held.mount("a", str(write_mlx(tmp_path / "a", pairs)))
    found = logits(loaded, held, ("a",), case)
    expected = logits(load_model(whole), case=case)
    assert same(found, expected) <= 1e-5 * max(1.0, float(np.abs(expected).max()))
    assert same(found, base) > 1e-3
    assert same(logits(loaded, held, (), case), base) == 0


@pytest.mark.parametrize("spread", [False, True], ids=["alpha over r", "over its root"])
def test_an_adapter_of_peft_is_turned_and_its_prefix_taken_off(spread: bool, tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    pairs = random_pairs(model, ALL, rank=4)
    scale = 2 / 4**0.5 if spread else 2 / 4
    loaded, held = opened(model)
    held.mount("p", str(write_peft(tmp_path / "p", pairs, alpha=2, use_rslora=spread)))
    held.mount("m", str(write_mlx(tmp_path / "m", pairs, scale=scale)))
    assert same(logits(loaded, held, ("p",)), logits(loaded, held, ("m",))) == 0


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "base_model.model.language_model."])
def test_names_of_an_adapter_may_have_other_prefixes(prefix: str, tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    pairs = random_pairs(model)
    loaded, held = opened(model)
    held.mount("plain", str(write_mlx(tmp_path / "plain", pairs)))
    other = {prefix + name.removeprefix("model."): pair for name, pair in pairs.items()}
    held.mount("other", str(write_mlx(tmp_path / "other", other)))
    assert same(logits(loaded, held, ("plain",)), logits(loaded, held, ("other",))) == 0


def test_an_adapter_on_quantized_weights_adds_to_what_they_stand_for(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model", quantize=Q8)
    plain = dequantized(model, tmp_path / "plain")
    pairs = random_pairs(plain, ALL)
    whole = adapted(plain, tmp_path / "dense", {name: product(pair, 0.5) for name, pair in pairs.items()})
    loaded, held = opened(model)
    held.mount("a", str(write_mlx(tmp_path / "a", pairs)))
    assert same(logits(loaded, held, ("a",)), dense_of(whole)) <= 1e-4


@pytest.mark.parametrize("case", ["llama_tied", "llama_biases"])
def test_a_dora_adapter_gives_rows_their_magnitude(case: str, tmp_path: Path) -> None:
    model = write_case(case, tmp_path / "model")
    pairs, weights = random_pairs(model, ALL), weights_of(model)
    rng = np.random.default_rng(5)
    added, magnitudes = {}, {}
    for name, pair in pairs.items():
        base = weights[f"{name}.weight"].astype(np.float64)
        summed = base + product(pair, 0.5)
        m = lengths(base) * rng.uniform(0.8, 1.2, len(base))
        magnitudes[name] = m.astype(np.float32)
        added[name] = (m / lengths(summed))[:, None] * summed - base
    whole = adapted(model, tmp_path / "dense", added)
    loaded, held = opened(model)
    held.mount("d", str(write_mlx(tmp_path / "d", pairs, magnitudes=magnitudes)))
    expected = logits(load_model(whole), case=case)
    assert same(logits(loaded, held, ("d",), case), expected) <= 2e-5 * max(
        1.0, float(np.abs(expected).max())
    )


def test_stacked_adapters_are_added_in_order_and_a_dora_is_not_stacked(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    first, second = random_pairs(model, seed=1), random_pairs(model, ALL, seed=2)
    both = {name: product(pair, 0.5) for name, pair in second.items()}
    for name, pair in first.items():
        both[name] = both[name] + product(pair, 0.25)
    loaded, held = opened(model)
    held.mount("a", str(write_mlx(tmp_path / "a", first, scale=0.25)))
    held.mount("b", str(write_mlx(tmp_path / "b", second)))
    stacked = logits(loaded, held, ("a", "b"))
    assert same(stacked, dense_of(adapted(model, tmp_path / "dense", both))) <= 1e-5
    assert same(stacked, logits(loaded, held, ("b", "a"))) <= 1e-5  # sums in another order, nothing else
    assert held.acquire(("a", "b")) != held.acquire(("b", "a"))
    magnitudes = {name: np.ones(b.shape[1], np.float32) for name, (_, b) in first.items()}
    held.mount("d", str(write_mlx(tmp_path / "d", first, magnitudes=magnitudes)))
    with pytest.raises(Refused, match="DoRA") as refused:
        held.acquire(("a", "d"))
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST
    assert held.acquire(("d",))


def test_an_unmounted_adapter_leaves_no_bit_and_no_byte(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    path = str(write_mlx(tmp_path / "a", random_pairs(model, ALL, rank=16)))
    loaded, held = opened(model)
    base = logits(loaded)
    mx.clear_cache()
    before = mx.get_active_memory()
    info = held.mount("a", path)
    assert held.mount("a", path) == info
    assert mx.get_active_memory() - before >= info.num_bytes
    assert same(logits(loaded, held, ("a",)), base) > 0
    assert held.unmount("a")
    assert not held.unmount("a")
    assert mx.get_active_memory() <= before
    assert all(linear.delta is None for linear in loaded.linears.values())
    assert same(logits(loaded, held, ()), base) == 0
    assert held.mounted() == []


def test_an_adapter_in_use_leaves_when_its_rows_have(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    path = str(write_mlx(tmp_path / "a", random_pairs(model)))
    loaded, held = opened(model)
    held.mount("a", path)
    held.acquire(("a",))
    used = logits(loaded, held, ("a",))
    assert held.unmount("a")
    assert held.mounted() == []
    assert same(logits(loaded, held, ("a",)), used) == 0
    held.mount("a", path)  # wanted again: it stays
    held.release(("a",))
    assert [one.key for one in held.mounted()] == ["a"]
    held.acquire(("a",))
    held.unmount("a")
    held.release(("a",))
    assert all(linear.delta is None for linear in loaded.linears.values())


Spoil = Callable[[dict[str, np.ndarray], dict[str, object]], None]


def _set(name: str, value: object) -> Spoil:
    return lambda tensors, config: tensors.__setitem__(name, value)


A, B = "model.layers.0.self_attn.q_proj.lora_a", "model.layers.0.self_attn.q_proj.lora_b"
F32 = np.float32


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_set(A, np.zeros((8, 4), F32)), "q_proj is"),
        (_set(A, np.zeros((64, 3), F32)), "no rank in common"),
        (_set(A, np.zeros((1, 64, 4), F32)), "two dimensions"),
        (_set(A, np.zeros((64, 4), np.int32)), "is I32"),
        (_set(B, np.full((4, 64), np.nan, F32)), "no numbers"),
        (_set(B, np.full((4, 64), np.inf, F32)), "no numbers"),
        (_set("model.layers.0.self_attn.q_proj.weight", np.zeros((64, 64), F32)), "not part of a LoRA"),
        (_set("model.layers.9.self_attn.q_proj.lora_a", np.zeros((64, 4), F32)), "has no lora_b"),
        (lambda tensors, config: tensors.pop(B), "has no lora_b"),
        (lambda tensors, config: tensors.clear(), "no tensors"),
        (lambda tensors, config: config.update(fine_tune_type="full"), "type full"),
        (lambda tensors, config: config.update(lora_parameters={"scale": "much"}), "not a number"),
        (lambda tensors, config: config.update(fine_tune_type="dora"), "no magnitudes"),
    ],
)
def test_a_bad_adapter_leaves_the_model_untouched(spoil: Spoil, said: str, tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    loaded, held = opened(model)
    base = logits(loaded)
    good = write_mlx(tmp_path / "a", random_pairs(model))
    weights = safetensors.numpy.load_file(good / "adapters.safetensors")
    config = json.loads((good / "adapter_config.json").read_text())
    spoil(weights, config)
    write_raw(good, "adapters.safetensors", weights, config)
    with pytest.raises(Refused, match=said) as refused:
        held.mount("a", str(good))
    assert "\n" not in refused.value.failure.message
    assert refused.value.failure.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED)
    assert held.mounted() == []
    assert all(linear.delta is None for linear in loaded.linears.values())
    assert same(logits(loaded, held, ()), base) == 0


def test_an_adapter_of_modules_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    loaded, held = opened(model)
    pairs = {"model.layers.0.self_attn.other_proj": (np.zeros((64, 4), F32), np.zeros((4, 64), F32))}
    with pytest.raises(Refused, match="other_proj, which the model has not"):
        held.mount("a", str(write_mlx(tmp_path / "a", pairs)))
    assert not held.mounted()
    assert loaded.linears


def test_an_adapter_file_cut_off_or_missing_is_refused_in_one_line(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    _, held = opened(model)
    folder = write_mlx(tmp_path / "a", random_pairs(model))
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(Refused, match="truncated"):
        held.mount("a", str(folder))
    (folder / "adapter_config.json").unlink()
    with pytest.raises(Refused, match="no such file"):
        held.mount("a", str(folder))
    with pytest.raises(Refused, match="not an adapter"):
        held.mount("a", str(tmp_path / "nowhere"))
