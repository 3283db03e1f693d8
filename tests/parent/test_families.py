"""What a config must say before anybody counts with it."""

from typing import Any

import pytest

from parent.library.families import FAMILIES, config_fault
from parent.library.fit import shape_of
from shared.model_config import normalise
from tests.oracles import checkpoints


def config_of(name: str, **changes: Any) -> dict[str, Any]:
    config = {**checkpoints.case(name)[0], **changes}
    return normalise({key: value for key, value in config.items() if value is not ...})


@pytest.mark.parametrize("name", checkpoints.names())
def test_every_case_can_be_counted_with(name: str) -> None:
    config = config_of(name)
    assert config["model_type"] in FAMILIES
    assert config_fault(config) == ""


@pytest.mark.parametrize(
    ("name", "changes", "fault"),
    [
        ("qwen3_moe", {"num_experts": ...}, "num_experts is missing"),
        ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0, not a number from 1"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        ("glm4_moe", {"moe_intermediate_size": "wide"}, "moe_intermediate_size is 'wide', not a number"),
        ("glm4_moe", {"n_group": 3}, "8 experts do not divide into 3 groups of two or more"),
        ("glm4_moe", {"n_group": 8}, "8 experts do not divide into 8 groups of two or more"),
        ("glm4_moe", {"topk_group": 5}, "topk_group is 5, not a number from 1 to 4"),
        ("glm4_moe", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, more than 2 groups"),
        ("gpt_oss", {"num_local_experts": None}, "num_experts is missing"),
        ("deepseek_v3", {"kv_lora_rank": ...}, "kv_lora_rank is missing"),
        ("glm4_moe_lite", {"v_head_dim": True}, "v_head_dim is True, not a number"),
        ("gemma4_moe", {"num_experts": None}, "num_experts is missing"),
        ("gemma4_moe", {"top_k_experts": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
        ("gemma4_e", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, not a number from 1 to 5"),
        ("gemma4_e", {"num_kv_shared_layers": "all"}, "num_kv_shared_layers is 'all', not a number"),
        ("gemma4_e", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input is -1, not a number"),
        ("gemma4_e", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 6 layers"),
        (
            "gemma4_e",
            {"per_layer_config": {"5": {"head_dim": "wide"}}},
            "per_layer_config of layer 5: head_dim is 'wide', not a number",
        ),
        ("qwen3_5", {"linear_key_head_dim": 0}, "linear_key_head_dim is 0, not a number"),
        ("qwen3_5", {"linear_num_value_heads": 3}, "linear_num_value_heads 3 is no multiple of"),
        ("qwen3_5_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
    ],
)
def test_a_fault_is_named(name: str, changes: dict[str, Any], fault: str) -> None:
    assert fault in config_fault(config_of(name, **changes))


def test_a_step_holds_the_answers_of_all_experts_of_a_token() -> None:
    assert shape_of(config_of("llama_tied")).intermediate == 128
    assert shape_of(config_of("qwen3_moe")).intermediate == 2 * (64 + 32)


def test_a_step_holds_what_layers_of_gemma_4_and_qwen_3_5_add() -> None:
    assert shape_of(config_of("gemma4_e")).intermediate == 2 * 128 + 6 * 32
    assert shape_of(config_of("gemma4_unified")).intermediate == 128
    assert shape_of(config_of("qwen3_5")).intermediate == (7 * (2 * 2 * 16 + 4 * 32) + 640 * 4) // 3


def test_a_step_holds_the_keys_and_values_that_latents_are_multiplied_out_to() -> None:
    assert shape_of(config_of("llama_tied")).expanded == 0
    assert shape_of(config_of("deepseek_v3")).expanded == 4 * (32 + 32 + 16 + 16)
