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
