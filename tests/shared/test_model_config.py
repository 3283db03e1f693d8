"""Both spellings of config.json become one."""

from typing import Any

import pytest

from shared.kv_layout import kv_layers
from shared.model_config import normalise

BASE = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {**LINEAR, "rope_theta": 5e5},
        ),
        ({"rope_parameters": {**LINEAR, "rope_theta": 7.0}}, {**LINEAR, "rope_theta": 7.0}),
        ({"rope_parameters": dict(LINEAR), "rope_theta": 7.0}, {**LINEAR, "rope_theta": 7.0}),
        # rope_scaling wins over rope_parameters, as in transformers
        (
            {"rope_scaling": dict(LINEAR), "rope_parameters": {"rope_type": "default", "rope_theta": 3.0}},
            LINEAR,
        ),
        (
            {"rope_theta": 7.0, "partial_rotary_factor": 0.5},
            {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5},
        ),
        (
            {"max_position_embeddings": 99, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 99},
        ),
        (
            {
                "max_position_embeddings": 99,
                "original_max_position_embeddings": 40,
                "rope_scaling": {"type": "longrope", "original_max_position_embeddings": 50},
            },
            {"rope_type": "longrope", "original_max_position_embeddings": 40},
        ),
        (
            {
                "rope_theta": 1e4,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default"},
                    "factor": 8,
                },
            },
            {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ],
)
def test_rope_of_either_dialect(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = normalise({**BASE, **given})
    assert config["rope_parameters"] == expected
    assert not {"rope_scaling", "rope_theta", "partial_rotary_factor"} & config.keys()


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"torch_dtype": "float32", "dtype": "bfloat16"}, "dtype", "bfloat16"),
        ({"dtype": "torch.float16"}, "dtype", "float16"),
        ({}, "head_dim", 16),
        ({"head_dim": None}, "head_dim", 16),
        ({"head_dim": 32}, "head_dim", 32),
        ({}, "num_key_value_heads", 4),
        ({"num_key_value_heads": 2}, "num_key_value_heads", 2),
        ({"eos_token_id": 7}, "eos_token_id", [7]),
        ({"eos_token_id": [7, 8]}, "eos_token_id", [7, 8]),
        ({"eos_token_id": None}, "eos_token_id", []),
        ({"quantization": {"bits": 4}}, "quantization", {"bits": 4}),
        (
            {"quantization_config": {"bits": 4, "group_size": 32}},
            "quantization",
            {"bits": 4, "group_size": 32},
        ),
        (
            {"quantization": {"bits": 4}, "quantization_config": {"quant_method": "awq", "bits": 4}},
            "quantization",
            {"bits": 4},
        ),
        ({"num_local_experts": 8}, "num_experts", 8),
        ({"n_routed_experts": 8}, "num_experts", 8),
        ({"model_type": "gpt_oss", "intermediate_size": 9}, "moe_intermediate_size", 9),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "quantization",
            {"mode": "mxfp4", "bits": 4, "group_size": 32},
        ),
    ],
)
def test_one_spelling(given: dict[str, Any], key: str, expected: Any) -> None:
    assert normalise({**BASE, **given})[key] == expected


def test_nulls_are_dropped() -> None:
    assert None not in normalise({**BASE, "pad_token_id": None, "torch_dtype": None}).values()


@pytest.mark.parametrize(
    ("given", "windows"),
    [
        ({}, [0, 0]),
        ({"sliding_window": 8}, [0, 0]),  # llama has no window, whatever the config says
        ({"model_type": "mistral"}, [4096, 4096]),  # the default of transformers
        ({"model_type": "mistral", "sliding_window": None}, [0, 0]),
        ({"model_type": "mistral", "sliding_window": 8}, [8, 8]),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, [8, 0]),
        ({"model_type": "phi3", "sliding_window": 8}, [8, 8]),
        ({"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}, [0, 0]),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "max_window_layers": 1,
                "use_sliding_window": True,
            },
            [0, 8],
        ),
        ({"model_type": "qwen3", "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, [0, 0]),
        ({"model_type": "gpt_oss", "sliding_window": 8}, [8, 0]),
    ],
)
def test_windows_by_layer(given: dict[str, Any], windows: list[int]) -> None:
    assert [layer.window for layer in kv_layers(normalise({**BASE, **given}))] == windows


def test_latent_attention_keeps_a_latent_and_a_key() -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    layers = kv_layers(normalise({**BASE, "model_type": "deepseek_v3", **sizes}))
    assert [layer.token_values() for layer in layers] == [576, 576]


def test_mxfp4_in_the_layout_of_gpt_oss_is_no_other_familys() -> None:
    with pytest.raises(ValueError, match="quantized with 'mxfp4'"):
        normalise({**BASE, "quantization_config": {"quant_method": "mxfp4"}})


GEMMA3 = {
    "hidden_size": 2560,
    "model_type": "gemma3_text",
    "num_hidden_layers": 12,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}


def test_a_sparse_gemma_3_inside_another_model_is_completed() -> None:
    config = normalise({"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": GEMMA3})
    assert config["head_dim"] == 256
    assert config["num_key_value_heads"] == 4
    assert config["hidden_act"] == "gelu_pytorch_tanh"
    assert config["vocab_size"] == 262208
    assert config["eos_token_id"] == [1, 106]
    assert config["layer_types"] == 2 * (5 * ["sliding_attention"] + ["full_attention"])
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }


def test_both_spellings_of_gemma_3s_ropes_are_one() -> None:
    base = {**GEMMA3, "rope_scaling": None}
    old = normalise({**base, "rope_theta": 5e5, "rope_local_base_freq": 77.0, "sliding_window_pattern": 3})
    new = normalise(
        {
            **base,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
            },
            "layer_types": 4 * (2 * ["sliding_attention"] + ["full_attention"]),
        }
    )
    for key in ("rope_parameters", "layer_types"):
        assert old[key] == new[key]
    assert kv_layers(old) == kv_layers(new)


def gemma4(**more: Any) -> dict[str, Any]:
    return {"model_type": "gemma4_text", "num_hidden_layers": 12, **more}


@pytest.mark.parametrize(
    ("old", "new", "kv_heads"),
    [
        (
            {"global_head_dim": 64, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
            {
                "per_layer_config": {
                    number: {"head_dim": 64, "num_key_value_heads": 1} for number in ("05", "11")
                }
            },
            1,
        ),
        (
            {"global_head_dim": 64, "num_global_key_value_heads": 1},
            {"per_layer_config": {5: {"head_dim": 64}, 11: {"head_dim": 64}}},
            4,
        ),
        ({"global_head_dim": 64}, {"per_layer_config": {"5": {"head_dim": 64}, "11": {"head_dim": 64}}}, 4),
    ],
)
def test_both_spellings_of_gemma_4s_sizes_are_one(
    old: dict[str, Any], new: dict[str, Any], kv_heads: int
) -> None:
    layers = kv_layers(normalise(gemma4(**old)))
    assert layers == kv_layers(normalise(gemma4(**new)))
    assert [(layer.num_kv_heads, layer.head_dim) for layer in layers[4:6]] == [(4, 256), (kv_heads, 64)]


def test_the_last_layer_of_gemma_4_attends_to_all_tokens_and_sharers_have_no_cache() -> None:
    config = normalise(gemma4(layer_types=12 * ["sliding_attention"], num_kv_shared_layers=0))
    assert [layer.window for layer in kv_layers(config)] == 11 * [512] + [0]
    assert len(kv_layers(normalise(gemma4(num_kv_shared_layers=5)))) == 7


@pytest.mark.parametrize(
    "spelling",
    [
        {"full_attention_interval": 4},
        {},
        {"layer_types": 2 * (3 * ["linear_attention"] + ["full_attention"])},
    ],
)
def test_qwen_3_5_keeps_states_in_all_but_every_fourth_layer(spelling: dict[str, Any]) -> None:
    config = normalise({"model_type": "qwen3_5_text", "num_hidden_layers": 8, **spelling})
    layers = kv_layers(config)
    assert [layer.is_recurrent for layer in layers] == 2 * [True, True, True, False]
    assert layers[0].state == 3 * (2 * 16 * 128 + 32 * 128)
    assert layers[0].state32 == 32 * 128 * 128
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.25


def test_experts_alone_say_how_wide_an_mlp_is() -> None:
    text = {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 384}
    assert normalise({"model_type": "qwen3_5_moe", "text_config": text})["intermediate_size"] == 384


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (gemma4(per_layer_config=[1]), "per_layer_config is"),
        (gemma4(per_layer_config={"full_attention": {}}), "not numbers of layers"),
        ({**GEMMA3, "rope_scaling": "far"}, "rope_scaling is 'far', not an object"),
        ({**GEMMA3, "sliding_window_pattern": 0}, "one layer in 0 is to be of full attention"),
        ({"model_type": "qwen3_5_text", "full_attention_interval": "x"}, "one layer in 'x'"),
    ],
)
def test_what_has_no_meaning_is_told(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        normalise(raw)
