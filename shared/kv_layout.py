"""What a model's KV cache costs, layer by layer, from its normalised config alone.

One entry per cache that a row has: layers that use the cache of another one have none of their own. The worker builds
its caches from the same list, so that what is reckoned is what is held.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from shared.encoders import ENCODERS

Config = Mapping[str, Any]

KV_STEP = 256
"""Tokens by which the buffers of a KV cache grow."""

KV_PIECE = 64
"""Tokens of a block of KV on disk; all of them are kept in one way."""

_BITS, _GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)

# Which layers have the model's `sliding_window`, by family, unless `layer_types` says otherwise.
_SLIDES: Mapping[str, Callable[[Config, int], bool]] = {
    **dict.fromkeys(("mistral", "ministral3", "phi3", "qwen3_moe"), lambda config, layer: True),
    **dict.fromkeys(("qwen2", "qwen3"), lambda config, layer: layer >= config.get("max_window_layers", 28)),
    "gpt_oss": lambda config, layer: layer % 2 == 0,
}


class LayerKv(msgspec.Struct, frozen=True):
    """What one layer keeps: so much per token, or (`num_kv_heads` 0) a state that does not grow.

    `window`: the most tokens it attends to, 0 = all of them. `value_dim`: of the values, where it is not `head_dim`.
    `state` and `state32`: numbers of a fixed size, in the activations' dtype and in float32. `bits` and `group_size`:
    how tokens are quantized, 0 = not at all; the first `plain` tokens never are (layers without a window).
    """

    num_kv_heads: int
    head_dim: int
    window: int = 0
    value_dim: int = 0
    state: int = 0
    state32: int = 0
    bits: int = 0
    group_size: int = 64
    plain: int = 0

    @property
    def is_recurrent(self) -> bool:
        return not self.num_kv_heads

    def token_values(self) -> int:
        """Numbers kept per token."""
        return self.num_kv_heads * (self.head_dim + (self.value_dim or self.head_dim))

    def bytes_of(self, tokens: int, elem_bytes: float, step: int = 1) -> float:
        """Bytes of so many tokens, each part rounded up to a multiple of `step` tokens."""
        if not self.bits:
            return self.token_values() * -(-tokens // step) * step * elem_bytes
        first = 0 if self.window else min(tokens, self.plain)
        packed = self.bits / 8 + 2 * elem_bytes / self.group_size
        return self.token_values() * (
            -(-first // step) * step * elem_bytes + -(-(tokens - first) // step) * step * packed
        )

    def fixed_bytes(self, elem_bytes: float) -> float:
        """Bytes that do not depend on the number of tokens."""
        return self.state * elem_bytes + self.state32 * 4


def kv_layers(config: Config) -> list[LayerKv]:
    """One entry per cache of a row, in the order of the layers."""
    family = config.get("text_model_type", config.get("model_type"))
    return _LAYOUTS.get(str(family), _attention_layers)(config)


def quantized(
    layers: Sequence[LayerKv], scheme: str, *, plain: int = 0, per_layer: Sequence[Mapping[str, Any]] = ()
) -> list[LayerKv]:
    """The same layers with their tokens kept as `scheme` says. Raises ValueError where that cannot be.

    `full`: as they come. `kv8`, `kv4`: layers that keep every token, in groups of 64, the first `plain` tokens
    excepted. `config`: as `per_layer` has it, the entries of a model's `kv_config.json`: `layer_idx` (into `layers`),
    `bits`, `group_size`. `auto`: `config` where there are entries, else `full`.
    """
    if scheme == "auto":
        scheme = "config" if per_layer else "full"
    if scheme == "full":
        return list(layers)
    found = list(layers)
    if scheme in ("kv8", "kv4"):
        for number, layer in enumerate(layers):
            if not layer.is_recurrent and not layer.window and not layer.value_dim:
                found[number] = _with(layer, int(scheme[2:]), 64, plain, number)
        return found
    if scheme != "config":
        raise ValueError(f"KV scheme {scheme!r} is not known; choose auto, full, kv8, kv4 or config")
    for entry in per_layer:
        place: Any = entry.get("layer_idx")
        bits: Any = entry.get("bits")
        if not isinstance(place, int) or not 0 <= place < len(found):
            raise ValueError(f"kv_config.json: layer_idx {place!r} is not one of the {len(found)} caches")
        if bits not in (0, 16, 32):
            found[place] = _with(layers[place], bits, entry.get("group_size", 64), plain, place)
    return found


def _with(layer: LayerKv, bits: Any, group_size: Any, plain: int, place: int) -> LayerKv:
    if bits not in _BITS or group_size not in _GROUPS:
        raise ValueError(
            f"cache {place} would be kept in {bits!r} bits with groups of {group_size!r}, which MLX has not"
        )
    if layer.is_recurrent or layer.value_dim:
        raise ValueError(f"cache {place} is not one of keys and values, and cannot be quantized")
    if layer.head_dim % group_size:
        raise ValueError(
            f"cache {place} has heads of {layer.head_dim}, which do not divide into groups of {group_size}"
        )
    return msgspec.structs.replace(
        layer, bits=bits, group_size=group_size, plain=0 if layer.window else plain
    )


def kept_as(config: Config, scheme: str, plain: int = 0) -> list[LayerKv]:
    """`kv_layers` of a model with its tokens kept as `quantized` says, `plain` rounded up to whole pieces.

    Raises ValueError where that cannot be.
    """
    plain = -(-plain // KV_PIECE) * KV_PIECE
    return quantized(kv_layers(config), scheme, plain=plain, per_layer=config.get("kv_config") or ())


def kv_bytes(layers: Sequence[LayerKv], tokens: int, elem_bytes: float = 2) -> int:
    """Bytes of the cache of `tokens` tokens; sliding layers never hold more than their window."""
    total = 0.0
    for layer in layers:
        held = min(tokens, layer.window) if layer.window else tokens
        total += layer.bytes_of(held, elem_bytes) + layer.fixed_bytes(elem_bytes)
    return int(total)


def kv_room(layers: Sequence[LayerKv], tokens: int, chunk: int, elem_bytes: float = 2) -> int:
    """Bytes of the buffers that a worker holds for a row of `tokens` tokens, prefilled `chunk` at a time.

    More than `kv_bytes`: buffers grow by `KV_STEP`, and while a chunk is attended a sliding layer holds the window
    before it as well.
    """
    total = 0.0
    for layer in layers:
        held = min(tokens, layer.window - 1 + chunk) if layer.window else tokens
        total += layer.bytes_of(held, elem_bytes, KV_STEP)
        total += layer.fixed_bytes(elem_bytes) if tokens else 0
    return int(total)


def _never_slides(config: Config, layer: int) -> bool:
    return False


def attention_kinds(config: Config) -> list[str]:
    """`full_attention`, `sliding_attention` … of every layer, however the config says it."""
    count = config.get("num_hidden_layers", 0)
    kinds = config.get("layer_types") or []
    if len(kinds) == count:
        return list(kinds)
    family = config.get("text_model_type", config.get("model_type"))
    sliding = _SLIDES.get(str(family), _never_slides)
    windowed = bool(config.get("sliding_window"))
    return [
        "sliding_attention" if windowed and sliding(config, layer) else "full_attention"
        for layer in range(count)
    ]


# ---------------------------------------------------------------- by family


def _attention_layers(config: Config) -> list[LayerKv]:
    heads, dim = config.get("num_key_value_heads", 0), config.get("head_dim", 0)
    window = config.get("sliding_window", 0)
    return [
        LayerKv(heads, dim, window if kind == "sliding_attention" else 0) for kind in attention_kinds(config)
    ]


def _latent_layers(config: Config) -> list[LayerKv]:
    """Multi-head latent attention: a latent and a rotated key, shared by all heads."""
    rank, turned = config.get("kv_lora_rank", 0), config.get("qk_rope_head_dim", 0)
    return [LayerKv(1, rank, value_dim=turned)] * config.get("num_hidden_layers", 0)


def layer_sizes(config: Config) -> list[tuple[int, int]]:
    """KV heads and head dimension of every layer, where `per_layer_config` gives some layers others."""
    own = config.get("per_layer_config") or {}
    sizes = []
    for layer in range(config.get("num_hidden_layers", 0)):
        here = {**config, **own.get(str(layer), {})}
        sizes.append((here.get("num_key_value_heads", 0), here.get("head_dim", 0)))
    return sizes


def _donor_layers(config: Config) -> list[LayerKv]:
    """Gemma 4: the last layers use the keys and values of earlier ones."""
    kinds, window = attention_kinds(config), config.get("sliding_window", 0)
    donors = len(kinds) - config.get("num_kv_shared_layers", 0)
    return [
        LayerKv(heads, dim, window if kind == "sliding_attention" else 0)
        for kind, (heads, dim) in list(zip(kinds, layer_sizes(config), strict=True))[:donors]
    ]


def _hybrid_layers(config: Config) -> list[LayerKv]:
    """Qwen 3.5: most layers keep the last inputs of a convolution, and a matrix per head in float32."""
    key_dim, value_dim = config.get("linear_key_head_dim", 0), config.get("linear_value_head_dim", 0)
    key_heads, value_heads = config.get("linear_num_key_heads", 0), config.get("linear_num_value_heads", 0)
    wide = 2 * key_heads * key_dim + value_heads * value_dim
    linear = LayerKv(
        0,
        0,
        state=(config.get("linear_conv_kernel_dim", 1) - 1) * wide,
        state32=value_heads * value_dim * key_dim,
    )
    attention = LayerKv(config.get("num_key_value_heads", 0), config.get("head_dim", 0))
    return [linear if kind == "linear_attention" else attention for kind in attention_kinds(config)]


_LAYOUTS: Mapping[str, Callable[[Config], list[LayerKv]]] = {
    **dict.fromkeys(ENCODERS, lambda config: []),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), _donor_layers),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _hybrid_layers),
    "deepseek_v3": _latent_layers,
    "glm4_moe_lite": _latent_layers,
}
