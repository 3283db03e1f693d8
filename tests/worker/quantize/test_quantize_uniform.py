"""The uniform recipe beside mlx-lm: the same tensors to the byte, of every family it has; schemes, sources, layouts."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.convert import convert
from mlx_lm.utils import load_model as load_theirs

from shared.checkpoint import inspect
from shared.errors import Refused
from shared.lab import Quantize
from tests.oracles.checkpoints import case as case_of
from tests.oracles.checkpoints import write_case
from tests.worker.models.running import dequantized, one_case_a_family
from tests.worker.quantize.lab import UNIFORM, logits, raw, run_job, tensors_of
from worker.models import load_model
from worker.weights import written_scheme

FAMILIES: dict[str, dict[str, Any]] = {
    "llama_tied": {},
    "llama_biases": {},
    "mistral_window": {},
    "ministral3": {"rope_parameters": case_of("ministral3")[0]["rope_parameters"]},
    "smollm3": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"rope_scaling": None},
    "qwen3_moe": {},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "deepseek_v3": {},
    "gpt_oss": {},
    "gemma3": {},
    "gemma4_e": {},
    "gemma4_moe": {"num_kv_shared_layers": 0},
    "qwen3_5": {},
    "qwen3_5_moe": {},
}
"""Cases, and what their config has to say for mlx-lm to read it."""


def readable(case: str, folder: Path) -> Path:
    """The model of a case as mlx-lm can read it."""
    layout = "fused" if case in ("gemma4_moe", "qwen3_5_moe") else "hub"
    model = write_case(case, folder, dialect="legacy", dtype="bfloat16", layout=layout)
    file = model / "config.json"
    config = {**json.loads(file.read_text()), **FAMILIES[case]}
    if case.startswith("qwen3_5"):  # it knows them inside of multimodal models only
        tied = config["tie_word_embeddings"]
        config = {"model_type": case, "text_config": config, "tie_word_embeddings": tied}
    file.write_text(json.dumps(config))
    return model


def theirs(model: Path, folder: Path, **how: Any) -> Path:
    """What `mlx_lm.convert -q` makes."""
    with contextlib.redirect_stdout(io.StringIO()):
        convert(str(model), str(folder), quantize=True, **how)
    return folder


def scheme_of(folder: Path) -> dict[str, Any]:
    """The quantization of a config, with nothing left unsaid."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization"]
    return {
        key: {"mode": "affine", **value} if isinstance(value, dict) else value for key, value in found.items()
    }


def assert_same(ours: Path, other: Path) -> None:
    mine, wanted = tensors_of(ours), tensors_of(other)
    assert mine.keys() == wanted.keys()
    for name, tensor in mine.items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name
        assert raw(tensor) == raw(wanted[name]), name


@pytest.mark.parametrize("case", FAMILIES)
def test_quantized_tensors_are_those_of_mlx_lm_to_the_byte(case: str, tmp_path: Path) -> None:
    model = readable(case, tmp_path / "model")
    done, _ = run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "ours")
    ours, other = Path(done.output), theirs(model, tmp_path / "theirs", q_bits=4, q_group_size=32)
    assert_same(ours, other)
    if case != "gpt_oss":  # there the general entry is that of the experts
        assert scheme_of(ours) == scheme_of(other)


SCHEMES = [
    *({"bits": bits, "group_size": 64} for bits in (2, 3, 5, 6, 8)),
    {"bits": 4, "group_size": 32},
    {"bits": 4, "group_size": 128},
    {"mode": "mxfp4"},
    {"mode": "mxfp8"},
    {"mode": "nvfp4"},
]


@pytest.mark.parametrize("how", SCHEMES, ids=str)
@pytest.mark.parametrize("case", ["qwen3", "qwen3_moe"])
def test_every_scheme_is_that_of_mlx_lm_and_gives_what_its_values_give(
    case: str, how: dict[str, Any], tmp_path: Path
) -> None:
    model = write_case(case, tmp_path / "model", dialect="legacy", layout="mlx")
    done, _ = run_job(Quantize(model=str(model), measure=False, **how), tmp_path / "ours")
    given = {"bits": "q_bits", "group_size": "q_group_size", "mode": "q_mode"}
    other = theirs(model, tmp_path / "theirs", **{given[key]: value for key, value in how.items()})
    assert_same(Path(done.output), other)
    plain = dequantized(Path(done.output), tmp_path / "plain")
    assert np.abs(logits(Path(done.output), case) - logits(plain, case)).max() < 1e-3


@pytest.mark.parametrize("case", one_case_a_family())
def test_every_family_comes_out_of_every_layout_alike_and_loads(case: str, tmp_path: Path) -> None:
    found = []
    for layout in ("hub", "fused", "mlx"):
        if case == "gpt_oss" and layout != "hub":
            continue  # the hub's experts are in mxfp4 already, the others' are not
        model = write_case(case, tmp_path / layout, layout=layout)
        done, _ = run_job(Quantize(model=str(model), **UNIFORM), tmp_path / f"{layout}-q")
        found.append(Path(done.output))
        loaded = load_model(found[-1])
        assert loaded.quantization
        assert loaded.weights_bytes < load_model(model).weights_bytes
    for other in found[1:]:
        assert_same(found[0], other)


def test_experts_of_gpt_oss_stay_as_they_were_trained(tmp_path: Path) -> None:
    model = write_case("gpt_oss", tmp_path / "model")
    run_job(Quantize(model=str(model), bits=8, group_size=32, measure=False), tmp_path / "out")
    made, before = tensors_of(tmp_path / "out"), tensors_of(model)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        words = before[f"{name}.down_proj_blocks"].view(mx.uint32).flatten(-2)
        assert raw(made[f"{name}.down_proj.weight"]) == raw(words)
    assert np.abs(logits(tmp_path / "out", "gpt_oss") - logits(model, "gpt_oss")).max() < 0.1
    load_theirs(tmp_path / "out")
    again = Quantize(model=str(tmp_path / "out"), bits=4, group_size=32, measure=False)
    run_job(again, tmp_path / "again")
    assert raw(tensors_of(tmp_path / "again")[f"{name}.up_proj.weight"]) == raw(
        made[f"{name}.up_proj.weight"]
    )


@pytest.mark.parametrize("inside", ["gemma3", "gemma4", "qwen3_5"])
def test_text_comes_out_of_a_multimodal_model_without_its_towers(inside: str, tmp_path: Path) -> None:
    case = {"gemma4": "gemma4_e"}.get(inside, inside)
    alone = write_case(case, tmp_path / "alone")
    model = write_case(case, tmp_path / "model", inside=inside)
    done, _ = run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "out")
    run_job(Quantize(model=str(alone), **UNIFORM), tmp_path / "text")
    out = Path(done.output)
    assert all(name.startswith("language_model.") for name in tensors_of(out))
    assert np.array_equal(logits(out, case), logits(tmp_path / "text", case))
    assert inspect(out).modalities == ["text"]
    assert "vision_tower" in (out / "README.md").read_text()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_are_cast_to_the_type_of_the_config_first(dtype: str, tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model", dtype="float32", dialect="legacy")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "torch_dtype": dtype}))
    run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "ours")
    assert_same(tmp_path / "ours", theirs(model, tmp_path / "theirs", q_bits=4, q_group_size=32))
    assert tensors_of(tmp_path / "ours")["model.norm.weight"].dtype == getattr(mx, dtype)


@pytest.mark.parametrize(
    "scheme", [{"bits": 8, "group_size": 32}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}], ids=str
)
def test_a_quantized_source_is_multiplied_out_first_and_that_is_told(
    scheme: dict[str, Any], tmp_path: Path
) -> None:
    model = write_case("qwen3", tmp_path / "model", quantize=scheme)
    plain = dequantized(model, tmp_path / "plain")
    run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "a")
    run_job(Quantize(model=str(plain), **UNIFORM), tmp_path / "b")
    assert_same(tmp_path / "a", tmp_path / "b")
    assert "what that lost stays lost" in (tmp_path / "a" / "README.md").read_text()
    assert "stays lost" not in (tmp_path / "b" / "README.md").read_text()


def test_routers_of_a_model_in_mxfp4_are_affine_though_their_entry_does_not_say_so(tmp_path: Path) -> None:
    """As mlx-lm writes it."""
    model = write_case("qwen3_moe", tmp_path / "model", layout="mlx", dialect="legacy")
    other = theirs(model, tmp_path / "theirs", q_mode="mxfp4")
    entries = json.loads((other / "config.json").read_text())["quantization"]
    assert {"group_size": 64, "bits": 8} in entries.values()
    run_job(Quantize(model=str(model), mode="mxfp4", measure=False), tmp_path / "ours")
    assert np.array_equal(logits(other, "qwen3_moe"), logits(tmp_path / "ours", "qwen3_moe"))


def test_quantize_takes_a_model_that_was_saved_without_its_head(tmp_path: Path) -> None:
    """As models for vectors are."""
    model = write_case("qwen3", tmp_path / "model")
    tensors = {
        name.removeprefix("model."): one
        for name, one in tensors_of(model).items()
        if not name.startswith("lm_head")
    }
    mx.eval(tensors)
    mx.save_safetensors(str(model / "model.safetensors"), tensors, {"format": "pt"})
    run_job(Quantize(model=str(model), **UNIFORM), tmp_path / "out")
    assert "embed_tokens.scales" in tensors_of(tmp_path / "out")
    plain = dequantized(tmp_path / "out", tmp_path / "plain")
    assert np.abs(logits(tmp_path / "out", "qwen3") - logits(plain, "qwen3")).max() < 1e-3
    with pytest.raises(Refused, match="was saved without its head"):
        run_job(Quantize(model=str(model), rotate=True, **UNIFORM), tmp_path / "turned")


@pytest.mark.parametrize(
    ("entry", "wanted"),
    [
        ({"bits": 8, "group_size": 64}, {"bits": 8, "group_size": 64, "mode": "affine"}),
        ({"bits": 8}, {"bits": 8, "group_size": 32, "mode": "affine"}),
        ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, {"bits": 8, "group_size": 32, "mode": "mxfp8"}),
        ({}, {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
        (False, {"bits": 4, "group_size": 32, "mode": "mxfp4"}),
    ],
)
def test_quantized_modules_are_read_as_mlx_lm_reads_them(entry: Any, wanted: dict[str, Any]) -> None:
    general = {"bits": 4, "group_size": 32, "mode": "mxfp4", "a": entry}
    found = written_scheme(general, "a")
    assert {key: found[key] for key in wanted} == wanted
