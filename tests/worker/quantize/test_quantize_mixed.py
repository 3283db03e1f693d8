"""Bits by sensitivity: what is measured, who gets more, what is never exceeded, and that everybody loads it."""

import json
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model as load_theirs

from shared.checkpoint import inspect
from shared.errors import ErrorCode, Refused
from shared.jobs import JobStage
from shared.lab import Quantize
from tests.oracles.checkpoints import case, reference, write_case, write_model
from tests.worker.models.running import one_case_a_family
from tests.worker.quantize.lab import logits, run_job, tensors_of
from worker.measure.compare import measure
from worker.measure.texts import pieces
from worker.quantize.layout import layer_of, open_source
from worker.quantize.recipe import general_scheme, matrices, size_of, uniform
from worker.quantize.sensitivity import Progress, measure_all

QUICK: dict[str, Any] = {"group_size": 32, "num_calibration": 2, "calibration_tokens": 24}
SILENT = Progress(lambda done, total: None, lambda module, values: None, lambda: None)


def spec_for(model: Path, **options: Any) -> Quantize:
    return Quantize(model=str(model), **{**QUICK, "measure": False, **options})


def sensitivity(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "sensitivity.json").read_text())
    return found


def fragile(folder: Path) -> Path:
    """Eight layers, of which the sixth has a channel in every group that is 30 times as loud and a norm that makes up
    for it: the same function, and steps between the values of a group that are 30 times as wide.
    """
    config, seed = case("llama_tied")
    config = {**config, "num_hidden_layers": 8}
    write_model(config, seed, folder)
    tensors = tensors_of(folder)
    loud = mx.where(mx.arange(config["hidden_size"]) % 32 == 0, 30.0, 1.0)
    for norm, readers in (
        ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        tensors[f"model.layers.5.{norm}.weight"] /= loud
        for reader in readers:
            tensors[f"model.layers.5.{reader}.weight"] *= loud
    mx.eval(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "pt"})
    return folder


def test_quantize_gives_a_fragile_layer_more_bits(tmp_path: Path) -> None:
    model = fragile(tmp_path / "model")
    run_job(spec_for(model, target_bpw=5.8, candidate_bits=[3, 4, 6, 8]), tmp_path / "out")
    by_layer: dict[int | None, list[int]] = {}
    for module, one in sensitivity(tmp_path / "out")["modules"].items():
        if not module.endswith(("o_proj", "down_proj")):  # of those that read from the loud norms
            by_layer.setdefault(layer_of(f"{module}."), []).append(one["bits"])
    mean = {layer: sum(bits) / len(bits) for layer, bits in by_layer.items() if layer is not None}
    assert len(mean) == 8
    inner = [bits for layer, bits in mean.items() if layer not in (0, 5, 7)]
    assert mean[5] > max(inner) + 1
    modules = sensitivity(tmp_path / "out")["modules"]
    fifth, third = (modules[f"model.layers.{layer}.self_attn.v_proj"]["kl"]["4"] for layer in (5, 3))
    assert fifth > 10 * third


@pytest.mark.parametrize("case_name", one_case_a_family())
def test_every_family_is_quantized_by_sensitivity_and_everything_takes_part(
    case_name: str, tmp_path: Path
) -> None:
    model = write_case(case_name, tmp_path / "model")
    source = open_source(model)
    recipe = uniform(source, general_scheme(spec_for(model, bits=4)))
    small, large = (
        size_of(source, {**recipe.schemes, **{one.module: scheme for one in recipe.open}}).bits_per_weight
        for scheme in (general_scheme(spec_for(model, bits=bits)) for bits in (4, 8))
    )
    target = (small + large) / 2
    options = {"target_bpw": target, "num_calibration": 1, "calibration_tokens": 16}
    _, events = run_job(spec_for(model, **options), tmp_path / "out")
    found = sensitivity(tmp_path / "out")["modules"]
    assert set(found) == {one.module for one in recipe.open}
    assert {one["bits"] for one in found.values()} == {4, 8}
    for one in found.values():
        assert one["kl"]["4"] >= 0 or one["kl"]["4"] == pytest.approx(0, abs=1e-6)
    assert any("embed_tokens" in module for module in found)
    assert sum(one["kl"]["4"] > one["kl"]["8"] for one in found.values()) > 0.6 * len(found)
    made = inspect(tmp_path / "out")
    params = size_of(source, recipe.schemes).params
    assert made.weights_bytes * 8 / params <= target
    assert made.weights_bytes * 8 / params > small
    assert np.isfinite(logits(tmp_path / "out", case_name)).all()
    told = [event for event in events if isinstance(event, JobStage) and event.stage == "sensitivity"]
    assert [event.done for event in told] == list(range(1, len(found) + 1))


def test_what_is_measured_is_the_divergence_of_the_model_with_that_module_quantized(tmp_path: Path) -> None:
    """Beside models written with one module quantized."""
    model = write_case("gemma4_e", tmp_path / "model")
    rows = pieces(model, "", "calibration", 2, 24, param="calibration")
    source = open_source(model)
    some = [
        one
        for one in matrices(source)
        if one.module.endswith(("embed_tokens", "embed_tokens_per_layer", "layers.1.mlp.up_proj"))
        or one.module.endswith(("layers.0.self_attn.k_proj", "layers.2.per_layer_projection"))
    ]
    assert len(some) == 5
    found = measure_all(source, some, [3, 8], 32, rows, {}, SILENT)
    assert source.tensors == {}
    for module, values in found.items():
        for bits, value in values.items():
            path = tmp_path / f"{module}-{bits}"
            scheme = {"bits": bits, "group_size": 32}
            others = {one.module: False for one in matrices(open_source(model)) if one.module != module}
            write_case("gemma4_e", path, quantize={**scheme, **others})
            wanted = measure(path, [[*row, 0] for row in rows], model, lambda done, total: None).divergence
            assert wanted is not None
            assert value == pytest.approx(wanted.mean, rel=1e-3, abs=1e-6)


def test_what_is_known_is_not_measured_again(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    rows = [[1, 2, 3, 4, 5]]
    source = open_source(model)
    every = matrices(source)
    known = {one.module: {4: 0.5, 8: 0.25} for one in every}
    assert measure_all(source, every, [4, 8], 32, rows, known, SILENT) == known
    assert source.tensors  # nothing was loaded
    asked: list[str] = []
    progress = Progress(lambda done, total: None, lambda module, values: asked.append(module), lambda: None)
    del known[every[3].module]
    measure_all(source, every, [4, 8], 32, rows, known, progress)
    assert asked == [every[3].module]


@pytest.mark.parametrize("case_name", ["llama_tied", "qwen3_moe"])
def test_a_mix_loads_in_mlx_lm_with_the_same_logits(case_name: str, tmp_path: Path) -> None:
    model = write_case(case_name, tmp_path / "model", dialect="legacy")
    run_job(spec_for(model, target_bpw=6.6, candidate_bits=[3, 4, 6, 8]), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    bits = {one["bits"] for one in config["quantization"].values() if isinstance(one, dict)}
    assert len(bits) > 1
    theirs, _ = load_theirs(tmp_path / "out")
    ids = mx.array(reference(case_name)["input_ids"])
    found = np.array(theirs(ids[None])[0].astype(mx.float32))
    assert np.abs(found - logits(tmp_path / "out", case_name)).max() < 1e-3


def test_a_mix_of_more_bits_is_nearer_to_the_source_and_beats_one_of_equal_bits(tmp_path: Path) -> None:
    model = fragile(tmp_path / "model")
    rows = pieces(model, "", "held_out", 4, 64, param="calibration")

    def apart(folder: Path) -> float:
        found = measure(folder, rows, model, lambda done, total: None).divergence
        assert found is not None
        return found.mean

    run_job(Quantize(model=str(model), bits=4, group_size=32, measure=False), tmp_path / "even")
    params = sum(tensor.size for tensor in tensors_of(model).values())
    size = inspect(tmp_path / "even").weights_bytes
    candidates = [2, 3, 4, 5, 6, 8]
    found = []
    for number, target in enumerate((size * 8 / params, size * 8 / params + 1)):
        out = tmp_path / f"mixed-{number}"
        run_job(spec_for(model, target_bpw=target, candidate_bits=candidates), out)
        found.append(apart(out))
    assert inspect(tmp_path / "mixed-0").weights_bytes <= size
    assert found[0] < apart(tmp_path / "even")
    assert found[1] < found[0]


def test_routers_keep_their_bits_whatever_the_mix(tmp_path: Path) -> None:
    model = write_case("qwen3_moe", tmp_path / "model")
    run_job(spec_for(model, target_bpw=6.0, candidate_bits=[3, 8]), tmp_path / "out")
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    routers = {module: one for module, one in quantization.items() if module.endswith(".mlp.gate")}
    assert routers
    assert all(one == {"group_size": 64, "bits": 8, "mode": "affine"} for one in routers.values())
    assert not any(module.endswith(".mlp.gate") for module in sensitivity(tmp_path / "out")["modules"])


def test_quantize_looks_at_the_calibration_that_is_given(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    rows = tmp_path / "ours.jsonl"
    rows.write_text("".join(json.dumps({"text": f"harbour {n} lamps"}) + "\n" for n in range(40)))
    options = {"target_bpw": 7.0, "candidate_bits": [4, 8]}
    run_job(spec_for(model, **options), tmp_path / "a")
    run_job(spec_for(model, calibration=str(rows), **options), tmp_path / "b")
    assert sensitivity(tmp_path / "a") != sensitivity(tmp_path / "b")
    assert "| calibration | ours.jsonl |" in (tmp_path / "b" / "README.md").read_text()
    assert "| calibration | the text of mlxd |" in (tmp_path / "a" / "README.md").read_text()


def test_a_model_that_memory_cannot_hold_is_not_mixed_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    monkeypatch.setattr(os, "sysconf", lambda name: 200)  # pages of so many bytes, and so many of them
    with pytest.raises(Refused, match="the whole model has to be in memory") as refused:
        run_job(spec_for(model, target_bpw=7.0), tmp_path / "out")
    assert refused.value.failure.code is ErrorCode.CANNOT_FIT
    assert refused.value.failure.param == "target_bpw"
    run_job(spec_for(model, bits=4), tmp_path / "out")
