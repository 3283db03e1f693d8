"""What a model's KV cache costs, layer by layer, from its normalised config alone.

One entry per cache that a row has: layers that use the cache of another one have none of their own. The worker builds
its caches from the same list, so that what is reckoned is what is held.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

Config = Mapping[str, Any]

KV_STEP = 256
"""Tokens by which the buffers of a KV cache grow."""

# Families whose `sliding_window` holds for every layer, unless `layer_types` says otherwise.
_WINDOW_EVERYWHERE = frozenset({"mistral", "ministral3", "phi3"})


class LayerKv(msgspec.Struct, frozen=True):
    """What one layer keeps: so much per token, or (`num_kv_heads` 0) a state that does not grow.

    `window`: the most tokens it attends to, 0 = all of them. `value_dim`: of the values, where it is not `head_dim`.
    `state` and `state32`: numbers of a fixed size, in the activations' dtype and in float32.
    """

    num_kv_heads: int
    head_dim: int
    window: int = 0
    value_dim: int = 0
    state: int = 0
    state32: int = 0

    @property
    def is_recurrent(self) -> bool:
        return not self.num_kv_heads

    def token_values(self) -> int:
        """Numbers kept per token."""
        return self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    def fixed_bytes(self, elem_bytes: float) -> float:
        """Bytes that do not depend on the number of tokens."""
        return self.state * elem_bytes + self.state32 * 4


def kv_layers(config: Config) -> list[LayerKv]:
    """One entry per cache of a row, in the order of the layers."""
    family = config.get("text_model_type", config.get("model_type"))
    return _LAYOUTS.get(str(family), _attention_layers)(config)


def kv_bytes(config: Config, tokens: int, elem_bytes: float = 2) -> int:
    """Bytes of the cache of `tokens` tokens; sliding layers never hold more than their window."""
    total = 0.0
    for layer in kv_layers(config):
        held = min(tokens, layer.window) if layer.window else tokens
        total += layer.token_values() * held * elem_bytes + layer.fixed_bytes(elem_bytes)
    return int(total)


def kv_room(layers: Sequence[LayerKv], tokens: int, chunk: int, elem_bytes: float = 2) -> int:
    """Bytes of the buffers that a worker holds for a row of `tokens` tokens, prefilled `chunk` at a time.

    More than `kv_bytes`: buffers grow by `KV_STEP`, and while a chunk is attended a sliding layer holds the window
    before it as well.
    """
    total = 0.0
    for layer in layers:
        held = min(tokens, layer.window - 1 + chunk) if layer.window else tokens
        total += layer.token_values() * (-(-held // KV_STEP) * KV_STEP) * elem_bytes
        total += layer.fixed_bytes(elem_bytes) if tokens else 0
    return int(total)


def attention_kinds(config: Config) -> list[str]:
    """`full_attention`, `sliding_attention` … of every layer, however the config says it."""
    count = config.get("num_hidden_layers", 0)
    kinds = config.get("layer_types") or []
    if len(kinds) == count:
        return list(kinds)
    family = config.get("text_model_type", config.get("model_type"))
    everywhere = family in _WINDOW_EVERYWHERE and config.get("sliding_window")
    return ["sliding_attention" if everywhere else "full_attention"] * count


# ---------------------------------------------------------------- by family


def _attention_layers(config: Config) -> list[LayerKv]:
    heads, dim = config.get("num_key_value_heads", 0), config.get("head_dim", 0)
    window = config.get("sliding_window", 0)
    return [
        LayerKv(heads, dim, window if kind == "sliding_attention" else 0) for kind in attention_kinds(config)
    ]


_LAYOUTS: Mapping[str, Callable[[Config], list[LayerKv]]] = {}
