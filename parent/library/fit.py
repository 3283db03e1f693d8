"""Does a model fit? Bytes for weights, KV cache at a context, and one prefill step. Pure arithmetic.

The three terms are those a person can check by hand; `explain` shows them. KV per token comes from the
checkpoint (layers x KV heads x head size x 2 x element size), see `shared/checkpoint.py`.
"""

from collections.abc import Mapping

import msgspec

from shared.units import format_bytes

FLOAT_BYTES = 4  # mlx's CPU backend runs in float32; elsewhere this errs on the safe side
DEFAULT_CHUNK = 512  # prompt tokens in one prefill step where the settings leave it open
RESERVE = 0.10  # of memory, left to the system and to the parent


def loaded_bytes(dtypes: Mapping[str, int], *, float32: bool) -> int:
    """Bytes of the weights once loaded. `dtypes`: safetensors dtype name to payload bytes.

    With `float32` (mlx's CPU backend) 16-bit tensors, the scales of quantized ones included, are widened.
    """
    return sum(size * (2 if float32 and name in ("F16", "BF16") else 1) for name, size in dtypes.items())


class Shape(msgspec.Struct, frozen=True):
    """The sizes of a decoder that decide what one prefill step needs."""

    hidden: int
    intermediate: int
    heads: int
    vocab: int


class Fit(msgspec.Struct, frozen=True):
    """The bill for one model at one context, in bytes."""

    weights_bytes: int
    context: int
    kv_bytes: int  # at that context, sliding windows considered
    kv_bytes_per_token: int  # of a token inside every window
    transient_bytes: int
    memory_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.transient_bytes

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (1 - RESERVE))

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes

    @property
    def largest_context(self) -> int:
        """Tokens for which memory would do, the weights and one step being paid for; a safe bound where
        sliding windows cap the KV cache.
        """
        left = self.usable_bytes - self.weights_bytes - self.transient_bytes
        if left <= 0:
            return 0
        return left // self.kv_bytes_per_token if self.kv_bytes_per_token else self.context


def transient_bytes(shape: Shape, context: int, chunk: int = 0) -> int:
    """What one prefill step holds beside weights and KV, at its widest point.

    Residual and its norm, the gate and up products, the attention scores of one layer (heads x chunk x
    context: mlx's CPU backend writes them out) and the logits of one row.
    """
    rows = min(chunk or DEFAULT_CHUNK, context)
    per_row = 4 * shape.hidden + 3 * shape.intermediate + shape.heads * context
    return FLOAT_BYTES * (rows * per_row + shape.vocab)


def explain(fit: Fit) -> list[str]:
    """The arithmetic in lines for a person, the verdict last."""
    lines = [
        f"weights    {format_bytes(fit.weights_bytes):>8}",
        f"KV cache   {format_bytes(fit.kv_bytes):>8}   {_kv_arithmetic(fit)}",
        f"one step   {format_bytes(fit.transient_bytes):>8}   activations of a prefill step",
        f"needed     {format_bytes(fit.needed_bytes):>8}",
        f"usable     {format_bytes(fit.usable_bytes):>8}   "
        f"{format_bytes(fit.memory_bytes)} of memory less {RESERVE:.0%} for the system",
    ]
    if fit.fits:
        return [*lines, f"fits, with {format_bytes(fit.usable_bytes - fit.needed_bytes)} to spare"]
    over = format_bytes(fit.needed_bytes - fit.usable_bytes)
    if fit.largest_context:
        return [*lines, f"does not fit: {over} too much; up to --context {fit.largest_context} would"]
    return [*lines, f"does not fit: {over} too much, the weights alone leave no room"]


def _kv_arithmetic(fit: Fit) -> str:
    capped = "" if fit.kv_bytes == fit.context * fit.kv_bytes_per_token else ", less what windows drop"
    return f"{fit.context} tokens x {format_bytes(fit.kv_bytes_per_token)} a token{capped}"
