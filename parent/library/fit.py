"""Does a model fit? Bytes for weights, KV caches, kept prompts and one step. Pure arithmetic.

The terms are those a person can check by hand; `explain` shows them. KV per token comes from the checkpoint
(layers x KV heads x head size x 2 x element size), see `shared/model_config.py`. The bill is that of a busy
server: every row in use, at the whole context, with the prefix cache full.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.machine import Device
from shared.control import LaunchModel
from shared.encoders import FORWARD_CPU, FORWARD_GPU, is_encoder
from shared.errors import ErrorCode, refuse
from shared.kv_layout import LayerKv, kept_as, kv_bytes, kv_layers
from shared.units import format_bytes

FLOAT_BYTES = 4  # mlx's CPU backend runs in float32; elsewhere this errs on the safe side
_ENDLESS = 1 << 31  # tokens; a model that does not say its context
CHUNK_CPU, CHUNK_GPU = 128, 2048  # prompt tokens in one prefill step, as in worker/load.py


def loaded_bytes(dtypes: Mapping[str, int], *, float32: bool) -> int:
    """Bytes of the weights once loaded. `dtypes`: safetensors dtype name to payload bytes.

    With `float32` (mlx's CPU backend) 16-bit tensors, the scales of quantized ones included, are widened.
    """
    return sum(size * (2 if float32 and name in ("F16", "BF16") else 1) for name, size in dtypes.items())


class Shape(msgspec.Struct, frozen=True):
    """The sizes of a decoder that decide what one step needs."""

    hidden: int
    intermediate: int  # of a token: with experts, of all that it goes to, their answers included
    heads: int
    vocab: int
    expanded: int = 0  # values that latent attention makes of a token of context, in one layer


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The bill for one model at one context, in bytes."""

    weights_bytes: int
    context: int
    rows: int  # requests answered side by side
    row_bytes: int  # KV of one row at that context, sliding windows considered
    kv_bytes_per_token: int  # of a token inside every window
    row_fixed_bytes: int = 0  # of a row whatever its length: recurrent states
    prefix_bytes: int  # prompts kept for reuse
    chunk: int  # prompt tokens in one prefill step
    transient_bytes: int
    element_bytes: int = 2  # of one number in the KV cache
    memory_bytes: int
    usable_bytes: int  # what models may have of it, which `budget_name` explains
    budget_name: str = "memory"

    @property
    def kv_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def needed_bytes(self) -> int:
        return self._fixed_bytes + self.kv_bytes

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes

    @property
    def largest_context(self) -> int:
        """Tokens for which memory would do with all rows, the rest being paid for; a safe bound where sliding
        windows cap the KV cache.
        """
        left = self.usable_bytes - self._fixed_bytes
        if left <= 0:
            return 0
        left = max(0, left - self.rows * self.row_fixed_bytes)
        each = self.rows * self.kv_bytes_per_token
        return left // each if each else self.context

    @property
    def most_rows(self) -> int:
        """Rows for which memory would do at this context; 0 when not even one fits."""
        left = self.usable_bytes - self._fixed_bytes
        return max(left // self.row_bytes, 0) if self.row_bytes else self.rows

    @property
    def _fixed_bytes(self) -> int:
        return self.weights_bytes + self.prefix_bytes + self.transient_bytes


def transient_bytes(shape: Shape, context: int, chunk: int, rows: int = 1, *, scores: bool = True) -> int:
    """What one step holds beside weights and KV, at its widest point.

    Residual and its norm, the gate and up products of a prefill chunk, and the logits of every row. `scores`:
    the attention scores of one layer (heads x chunk x context) too, which mlx's CPU backend writes out; the
    fused kernels of a GPU never hold them.
    """
    tokens = min(chunk, context)
    per_token = 4 * shape.hidden + 3 * shape.intermediate + (shape.heads * context if scores else 0)
    return FLOAT_BYTES * (tokens * per_token + context * shape.expanded + rows * shape.vocab)


def forward_bytes(shape: Shape, context: int, most: int, *, scores: bool = True) -> int:
    """What the largest forward of an encoder holds beside its weights: `most` tokens, or one text of `context`.

    The stream, its norm, queries, keys, values and their sum, the MLP before and behind its activation, which mlx's CPU
    backend writes out in several steps; `scores` as above.
    """
    tokens = max(most, context)
    per_token = 8 * shape.hidden + 4 * shape.intermediate + (2 * shape.heads * context if scores else 0)
    return FLOAT_BYTES * tokens * per_token


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The sizes of the model that a normalised config describes."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    chosen = config.get("num_experts_per_tok", 0)
    nope, turned, value = (
        config.get(key, 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    doubled = 2 if config.get("use_double_wide_mlp") else 1
    layer_inputs = config["num_hidden_layers"] * config.get("hidden_size_per_layer_input", 0)
    return Shape(
        hidden=hidden,
        intermediate=layer_inputs
        + max(
            config["intermediate_size"] * doubled,
            chosen * (hidden + config.get("moe_intermediate_size", 0)),
            _delta_net_values(config) // 3,
        ),
        heads=heads,
        vocab=config["vocab_size"],
        expanded=heads * (2 * nope + turned + value),
    )


def _delta_net_values(config: Mapping[str, Any]) -> int:
    """Numbers per token of a chunk that a gated delta net holds at its widest, in float32; measured."""
    heads: int = config.get("linear_num_value_heads", 0)
    channels: int = 2 * config.get("linear_num_key_heads", 0) * config.get("linear_key_head_dim", 0)
    channels += heads * config.get("linear_value_head_dim", 0)
    return 7 * channels + 640 * heads


def runs_wide(entry: ModelEntry, device: Device, dtype: str = "auto") -> bool:
    """Whether the model's activations and KV are float32 there. `dtype`: the setting."""
    own = "float32" if device.kind == "cpu" else entry.dtype
    return (own if dtype == "auto" else dtype) == "float32"


def kv_layout_of(entry: ModelEntry, kv_cache: str = "auto", kv_start: int = 0) -> list[LayerKv]:
    """The caches of a row as these settings keep them; as they come where the model cannot be kept so, which its
    worker will refuse.
    """
    try:
        return kept_as(entry.config, kv_cache, kv_start)
    except ValueError:
        return kv_layers(entry.config)


def kv_bytes_of(
    entry: ModelEntry, tokens: int, float32: bool, *, kv_cache: str = "auto", kv_start: int = 0
) -> int:
    """Bytes of KV of one row of `tokens` tokens, sliding windows considered."""
    return kv_bytes(kv_layout_of(entry, kv_cache, kv_start), tokens, 4 if float32 else 2)


def bill(
    entry: ModelEntry,
    tokens: int,
    device: Device,
    how: Settings | LaunchModel,
) -> Fit:
    """The arithmetic for one model at `tokens` tokens of context on one device, from the entry alone.

    `how`: what says how.dtype, rows, chunk and caches. Raises `Refused` for a model that cannot be served.
    """
    if entry.error or not entry.config:
        reason = entry.error or "nothing is known of its sizes"
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{entry.id}: {reason}")
    config = entry.config
    float32 = runs_wide(entry, device, how.dtype)
    on_cpu = device.kind == "cpu"
    chunk = how.prefill_chunk or (CHUNK_CPU if on_cpu else CHUNK_GPU)
    shape = shape_of(config)
    if is_encoder(config):
        most = how.prefill_chunk or (FORWARD_CPU if on_cpu else FORWARD_GPU)
        return Fit(
            weights_bytes=loaded_bytes(entry.dtypes, float32=float32),
            context=tokens,
            rows=1,
            row_bytes=0,
            kv_bytes_per_token=0,
            prefix_bytes=0,
            chunk=most,
            transient_bytes=forward_bytes(shape, min(tokens, entry.context or tokens), most, scores=on_cpu),
            element_bytes=4 if float32 else 2,
            memory_bytes=device.memory_bytes,
            usable_bytes=device.budget_bytes,
            budget_name=device.budget_name,
        )

    def row(count: int) -> int:
        return kv_bytes_of(entry, count, float32, kv_cache=how.kv_cache, kv_start=how.kv_start)

    return Fit(
        weights_bytes=loaded_bytes(entry.dtypes, float32=float32),
        context=tokens,
        rows=how.max_rows,
        row_bytes=row(tokens),
        kv_bytes_per_token=row(how.kv_start + 1) - row(how.kv_start),
        row_fixed_bytes=row(0),
        element_bytes=4 if float32 else 2,
        prefix_bytes=how.prefix_cache_bytes,
        chunk=chunk,
        transient_bytes=transient_bytes(shape, tokens, chunk, how.max_rows, scores=on_cpu),
        memory_bytes=device.memory_bytes,
        usable_bytes=device.budget_bytes,
        budget_name=device.budget_name,
    )


def most_context(count: Callable[[int], Fit], most: int = 0) -> int:
    """The largest context that fits by the bills of `count`, which grow with it; `most` = no larger one is wanted."""
    least, above = 0, (most or _ENDLESS) + 1
    while above - least > 1:
        between = (least + above) // 2
        if count(between).fits:
            least = between
        else:
            above = between
    return least


def explain(fit: Fit) -> list[str]:
    """The arithmetic in lines for a person, the verdict last."""
    bill = [
        ("weights", fit.weights_bytes, ""),
        ("KV cache", fit.kv_bytes, _kv_arithmetic(fit)),
        ("prefix cache", fit.prefix_bytes, "prompts kept for reuse, at most (--prefix-cache-bytes)"),
        ("one step", fit.transient_bytes, f"{min(fit.chunk, fit.context)} prompt tokens at once"),
        ("needed", fit.needed_bytes, ""),
        (
            "usable",
            fit.usable_bytes,
            f"of {format_bytes(fit.memory_bytes)} of {fit.budget_name}",
        ),
    ]
    lines = [f"{name:<12}  {format_bytes(size):>8}   {why}".rstrip() for name, size, why in bill]
    if fit.fits:
        return [*lines, f"fits, with {format_bytes(fit.usable_bytes - fit.needed_bytes)} to spare"]
    over = format_bytes(fit.needed_bytes - fit.usable_bytes)
    ways = []
    if fit.largest_context:
        ways.append(f"--context {min(fit.largest_context, fit.context - 1)}")
    if fit.most_rows:
        ways.append(f"--max-rows {min(fit.most_rows, fit.rows - 1)}")
    if ways:
        return [*lines, f"does not fit: {over} too much; {' or '.join(ways)} would"]
    if fit.weights_bytes > fit.usable_bytes:
        return [*lines, f"does not fit: {over} too much, the weights alone leave no room"]
    return [*lines, f"does not fit: {over} too much; a smaller --prefix-cache-bytes or --prefill-chunk helps"]


def _kv_arithmetic(fit: Fit) -> str:
    capped = "" if fit.row_bytes == fit.context * fit.kv_bytes_per_token else ", less what windows drop"
    rows = f"{fit.rows} rows x " if fit.rows > 1 else ""
    return f"{rows}{fit.context} tokens x {format_bytes(fit.kv_bytes_per_token)} a token{capped}"
