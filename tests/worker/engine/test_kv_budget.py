"""Bytes of a row by kind of layer, and the longest row that a budget holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv_layout import LayerKv, kv_bytes, kv_layers
from worker.engine.kv_budget import BLOCK, KvBudget, rounded

FULL, SLIDING = LayerKv(2, 16), LayerKv(2, 16, window=40)
TOKEN = 2 * 2 * 16 * 4  # bytes of one token in one of these layers, float32

layers = st.lists(
    st.builds(LayerKv, st.integers(1, 4), st.integers(1, 32), st.integers(0, 700)), min_size=1, max_size=4
)


@pytest.mark.parametrize(
    ("kinds", "chunk", "tokens", "buffered"),
    [
        ([FULL], 128, 0, 0),
        ([FULL], 128, 1, 256),
        ([FULL], 128, 256, 256),
        ([FULL], 128, 257, 512),
        ([FULL, FULL], 128, 300, 1024),
        ([SLIDING], 128, 100_000, 256),  # 39 before the chunk and 128 in it
        ([SLIDING], 512, 100_000, 768),
        ([SLIDING], 512, 300, 512),
        ([SLIDING, FULL], 128, 600, 256 + 768),
    ],
)
def test_a_row_costs_whole_blocks_and_sliding_layers_only_what_they_hold(kinds, chunk, tokens, buffered):
    assert KvBudget(kinds, 4, chunk).row_bytes(tokens) == buffered * TOKEN


@pytest.mark.parametrize(
    ("kinds", "blocks", "ceiling", "most"),
    [
        ([FULL], 0.99, 4096, 0),
        ([FULL], 1, 4096, 256),
        ([FULL], 2.5, 4096, 512),
        ([FULL], 16, 4096, 4096),
        ([FULL], 100, 4096, 4096),
        ([FULL, FULL], 3, 4096, 256),
        ([SLIDING], 1, 4096, 4096),
        ([SLIDING, FULL], 3, 4096, 512),
    ],
)
def test_the_longest_row_of_a_budget(kinds, blocks, ceiling, most):
    assert KvBudget(kinds, 4, 128, int(blocks * BLOCK * TOKEN)).most_tokens(ceiling) == most


def test_no_limit_holds_everything():
    assert KvBudget([FULL], 4, 128).most_tokens(10**9) == 10**9
    assert KvBudget().row_bytes(10**9) == 0


@given(layers, st.integers(1, 600), st.integers(0, 3000), st.integers(0, 3000))
def test_more_tokens_never_cost_less_and_a_block_costs_the_same_to_its_end(kinds, chunk, a, b):
    budget = KvBudget(kinds, 2, chunk)
    low, high = sorted((a, b))
    assert budget.row_bytes(low) <= budget.row_bytes(high)
    assert budget.row_bytes(rounded(a)) == budget.row_bytes(a)


@given(layers, st.integers(1, 600), st.integers(1, 10**7), st.integers(0, 5000))
def test_the_longest_row_fits_and_one_token_more_does_not(kinds, chunk, limit, ceiling):
    budget = KvBudget(kinds, 2, chunk, limit)
    most = budget.most_tokens(ceiling)
    assert budget.row_bytes(most) <= limit
    assert most == ceiling or budget.row_bytes(most + 1) > limit


@given(st.integers(0, 400), st.integers(1, 3), st.integers(0, 3000), st.integers(1, 300))
def test_it_is_never_less_than_the_tokens_themselves(window, count, tokens, chunk):
    config = {
        "num_hidden_layers": count,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": window,
        "model_type": "mistral",
    }
    assert KvBudget(kv_layers(config), 2, chunk).row_bytes(tokens) >= kv_bytes(kv_layers(config), tokens, 2)
