"""Every family that llama.cpp names: a file with llama.cpp's tensor names becomes a model that computes the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest

from shared.control import LaunchJob
from shared.errors import Refused
from shared.jobs import ImportGguf, JobDone
from tests.oracles import checkpoints, layouts, weights
from tests.worker.jobs.gguf_files import Raw, floats, permuted, tokenizer_metadata, write
from tests.worker.jobs.test_gguf_kquants import sample
from tests.worker.models.running import logits_of
from worker import jobs
from worker.jobs.gguf_families import FAMILIES
from worker.models import FAMILIES as NATIVE
from worker.models import load_model

Config = dict[str, Any]
IDS = checkpoints.reference("llama_tied")["input_ids"]


def common(arch: str, config: Config) -> Config:
    """What llama.cpp's converter writes for every family."""
    found = {
        "general.architecture": arch,
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }
    if "head_dim" in config:
        found |= dict.fromkeys(
            (f"{arch}.attention.key_length", f"{arch}.attention.value_length"), config["head_dim"]
        )
    rope = config["rope_parameters"].get("full_attention", config["rope_parameters"])
    found[f"{arch}.rope.freq_base"] = rope["rope_theta"]
    if rope["rope_type"] in ("yarn", "linear"):
        found |= {
            f"{arch}.rope.scaling.type": rope["rope_type"],
            f"{arch}.rope.scaling.factor": rope["factor"],
        }
    if rope["rope_type"] == "yarn":
        original = rope["original_max_position_embeddings"]
        found[f"{arch}.rope.scaling.original_context_length"] = original
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                found[f"{arch}.rope.scaling.yarn_{key}"] = rope[key]
    return found


def experts(arch: str, config: Config) -> Config:
    count = config.get("num_experts") or config.get("n_routed_experts") or config["num_local_experts"]
    found = {
        f"{arch}.expert_count": count,
        f"{arch}.expert_used_count": config["num_experts_per_tok"],
        f"{arch}.expert_feed_forward_length": config.get(
            "moe_intermediate_size", config["intermediate_size"]
        ),
    }
    if "n_routed_experts" in config:
        found |= {
            f"{arch}.expert_shared_count": config["n_shared_experts"],
            f"{arch}.leading_dense_block_count": config["first_k_dense_replace"],
            f"{arch}.expert_weights_scale": config["routed_scaling_factor"],
            f"{arch}.expert_weights_norm": config["norm_topk_prob"],
            f"{arch}.expert_group_count": config["n_group"],
            f"{arch}.expert_group_used_count": config["topk_group"],
            f"{arch}.expert_gating_func": 2,
        }
    return found


def phi3(config: Config) -> Config:
    share = config["rope_parameters"]["partial_rotary_factor"]
    return {
        "phi3.rope.dimension_count": int(config["head_dim"] * share),
        "phi3.rope.scaling.original_context_length": config["original_max_position_embeddings"],
        "phi3.attention.sliding_window": config["sliding_window"],
    }


def deepseek(config: Config) -> Config:
    turned, nope, rank = config["qk_rope_head_dim"], config["qk_nope_head_dim"], config["kv_lora_rank"]
    return {
        **experts("deepseek2", config),
        "deepseek2.attention.head_count_kv": 1,
        "deepseek2.rope.dimension_count": turned,
        "deepseek2.attention.q_lora_rank": config["q_lora_rank"],
        "deepseek2.attention.kv_lora_rank": rank,
        "deepseek2.attention.key_length": rank + turned,
        "deepseek2.attention.value_length": rank,
        "deepseek2.attention.key_length_mla": nope + turned,
        "deepseek2.attention.value_length_mla": config["v_head_dim"],
        "deepseek2.rope.scaling.yarn_log_multiplier": 0.1 * config["rope_parameters"]["mscale_all_dim"],
    }


ROPE = checkpoints.case("deepseek_v3")[0]["rope_parameters"]
More = Callable[[Config], Config]

# architecture: (case, what its config has that a file cannot say otherwise, further metadata)
CASES: dict[str, tuple[str, Config, More]] = {
    "llama": ("llama_biases", {"mlp_bias": False}, lambda config: {}),
    "mistral3": (
        "ministral3",
        {},
        lambda config: {
            "mistral3.rope.scaling.yarn_log_multiplier": config["rope_parameters"]["mscale_all_dim"],
            "mistral3.attention.temperature_scale": config["rope_parameters"]["llama_4_scaling_beta"],
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}, lambda config: {}),
    "qwen2": ("qwen2", {"use_sliding_window": False}, lambda config: {}),
    "qwen3": ("qwen3", {}, lambda config: {}),
    "qwen3moe": (
        "qwen3_moe",
        {"norm_topk_prob": True, "mlp_only_layers": []},
        lambda config: experts("qwen3moe", config),
    ),
    "phi3": ("phi3", {}, phi3),
    "gemma3": (
        "gemma3",
        {"query_pre_attn_scalar": 16},
        lambda config: {
            "gemma3.attention.sliding_window": config["sliding_window"],
            "gemma3.attention.sliding_window_pattern": 2,
            "gemma3.rope.freq_base_swa": 100.0,
            "gemma3.final_logit_softcapping": config["final_logit_softcapping"],
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {"swiglu_limit": 7.0},
        lambda config: {
            **experts("gpt-oss", config),
            "gpt-oss.attention.sliding_window": config["sliding_window"],
        },
    ),
    "glm4moe": (
        "glm4_moe",
        {},
        lambda config: {**experts("glm4moe", config), "glm4moe.rope.dimension_count": 8},
    ),
    "deepseek2": (
        "deepseek_v3",
        {"attention_bias": False, "rope_parameters": {**ROPE, "mscale": 0.7, "mscale_all_dim": 0.7}},
        deepseek,
    ),
}


def file_of(arch: str) -> tuple[Config, int, dict[str, Any], dict[str, Raw]]:
    """Config and seed of a model, and its metadata and tensors as llama.cpp would have written them."""
    case, changes, more = CASES[arch]
    config, seed = checkpoints.case(case)
    config = {**config, **changes}
    count = config["num_hidden_layers"]
    number = next(one for one, name in reference.MODEL_ARCH_NAMES.items() if name == arch)
    names = reference.get_tensor_name_map(number, count)
    tensors: dict[str, Raw] = {}
    for name, value in layouts.mlx(dict(weights.build(config, seed)), config).items():
        if arch == "gemma3" and name.endswith("norm.weight"):
            value = value + np.float32(1)
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        ours = next((config[key] for part, key in heads.items() if f".{part}." in name), 0)
        if arch in ("llama", "mistral3", "smollm3") and ours:
            value = permuted(value, ours)
        for mine, theirs in (
            (".switch_mlp.", ".experts."),
            ("embed_q", "k_b_proj"),
            ("unembed_out", "v_b_proj"),
            ("e_score_correction_bias", "e_score_correction.bias"),
            ("self_attn.sinks", "self_attn.sinks.weight"),
        ):
            name = name.replace(mine, theirs)
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"llama.cpp has no name for {name}"
        tensors[found] = floats("F32", np.ascontiguousarray(value))
    rope = config["rope_parameters"]
    if "long_factor" in rope:
        for key in ("long", "short"):
            values = np.array(rope[f"{key}_factor"], np.float32)
            tensors[f"rope_factors_{key}.weight"] = floats("F32", values)
    return config, seed, {**common(arch, config), **more(config), **tokenizer_metadata()}, tensors


def convert(source: Path, output: Path, dtype: str = "float32") -> JobDone:
    spec = ImportGguf(source=str(source), name="tiny", dtype=dtype)
    return jobs.run(LaunchJob(job_id="1", spec=spec, output=str(output)), lambda event: None, lambda: False)


@pytest.mark.parametrize("arch", FAMILIES)
def test_oracle_an_imported_family_computes_what_its_checkpoint_does(arch: str, tmp_path: Path) -> None:
    config, seed, metadata, tensors = file_of(arch)
    convert(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out")
    plain = load_model(checkpoints.write_model(config, seed, tmp_path / "plain"))
    found = load_model(tmp_path / "out")
    assert found.checkpoint.model_type == FAMILIES[arch].model_type == config["model_type"]
    assert np.abs(logits_of(found.model, IDS, []) - logits_of(plain.model, IDS, [])).max() < 1e-4


def test_every_family_becomes_one_that_is_served() -> None:
    assert {family.model_type for family in FAMILIES.values()} <= set(NATIVE)
    assert set(CASES) == set(FAMILIES)


def test_layers_that_guess_further_ahead_are_left_out(tmp_path: Path) -> None:
    _, _, metadata, tensors = file_of("glm4moe")
    metadata["glm4moe.block_count"] += 1
    metadata["glm4moe.nextn_predict_layers"] = 1
    last = metadata["glm4moe.block_count"] - 1
    tensors[f"blk.{last}.nextn.eh_proj.weight"] = floats("F32", np.ones((4, 4), np.float32))
    convert(write(tmp_path / "m.gguf", metadata, tensors), tmp_path / "out")
    assert load_model(tmp_path / "out").checkpoint.config["num_hidden_layers"] == last


def test_experts_in_mxfp4_are_kept_bit_for_bit(tmp_path: Path) -> None:
    _, _, metadata, tensors = file_of("gpt-oss")
    for name, raw in list(tensors.items()):
        if name.endswith("_exps.weight"):
            rows = sample("MXFP4", raw.shape[0] * raw.shape[1], raw.shape[2])
            tensors[name] = Raw("MXFP4", raw.shape, rows.tobytes(), raw.values)
    source = write(tmp_path / "m.gguf", metadata, tensors)
    assert "error" not in convert(source, tmp_path / "kept", "keep").summary
    convert(source, tmp_path / "plain")
    kept = load_model(tmp_path / "kept", dtype="float32")
    assert kept.quantization == "mxfp4 4-bit group 32"
    plain = load_model(tmp_path / "plain")
    assert np.abs(logits_of(kept.model, IDS, []) - logits_of(plain.model, IDS, [])).max() < 0.05


@pytest.mark.parametrize(
    ("kind", "scheme", "most"),
    [
        ("Q4_K", "affine 4-bit group 32", 1e-3),
        ("Q5_K", "affine 5-bit group 32", 1e-3),
        ("Q6_K", "affine 6-bit group 32", 0.03),
        ("Q3_K", "affine 4-bit group 32", 0.1),
        ("Q2_K", "affine 4-bit group 32", 0.12),
        ("Q5_0", "affine 5-bit group 32", 0.0),
        ("Q5_1", "affine 5-bit group 32", 0.0),
    ],
)
def test_what_keeping_a_quantization_loses_is_told(
    kind: str, scheme: str, most: float, tmp_path: Path
) -> None:
    config, seed = checkpoints.case("llama_tied")
    config = {**config, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    tensors: dict[str, Raw] = {}
    names = reference.get_tensor_name_map(reference.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, value in weights.build(config, seed).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None
        tensors[found] = floats("F32", value.astype(np.float16).astype(np.float32))
        if value.ndim == 2:
            rows = sample(kind, *value.shape)
            tensors[found] = Raw(kind, value.shape, rows.tobytes(), value)
    metadata = {**common("llama", config), **tokenizer_metadata()}
    source = write(tmp_path / "m.gguf", metadata, tensors)
    done = convert(source, tmp_path / "kept", "keep")
    card = json.loads((tmp_path / "kept" / "mlxd.json").read_text())
    assert load_model(tmp_path / "kept").quantization == scheme
    if not most:
        assert "relative_rms_error" not in card
        assert "error" not in done.summary
        return
    assert f"relative RMS error against the file: {kind} " in done.summary
    told = card["relative_rms_error"]
    assert set(told) == {
        f"{part} {kind}"
        for part in ("embed_tokens", *(f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down")))
    }
    assert all(0 < loss < most for loss in told.values())
    if kind in ("Q4_K", "Q5_K"):  # the weights of the others are quantized anew, and these are no real ones
        convert(source, tmp_path / "plain")
        kept, plain = load_model(tmp_path / "kept").model, load_model(tmp_path / "plain").model
        exact = logits_of(plain, IDS, [])
        assert np.linalg.norm(logits_of(kept, IDS, []) - exact) / np.linalg.norm(exact) < 6 * most


@pytest.mark.parametrize(
    ("arch", "change", "told"),
    [
        ("deepseek2", {"deepseek2.expert_gating_func": 1}, "function 1; sigmoid"),
        ("qwen3", {"qwen3.rope.dimension_count": 4}, "rotated parts of a head differ"),
        ("mistral3", {"mistral3.rope.scaling.type": "none"}, "it has yarn"),
        ("gemma3", {"gemma3.attention.sliding_window": "wide"}, "gemma3.attention.sliding_window is 'wide'"),
    ],
)
def test_what_a_family_cannot_carry_over_is_refused_by_name(
    arch: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    _, _, metadata, tensors = file_of(arch)
    with pytest.raises(Refused, match=told):
        convert(write(tmp_path / "m.gguf", {**metadata, **change}, tensors), tmp_path / "out")
