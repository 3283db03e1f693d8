"""The k-quants of GGUF as numpy arrays: what their blocks of 256 values mean, one number after another.

Source: `dequantize_row_q2_K` … `dequantize_row_q6_K` of ggml's `ggml-quants.c`. Q4_K and Q5_K are `scale * q - least`
for each 32 values, which is MLX's `affine` mode with groups of 32; the others have groups of 16, or odd codes, which it
has not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK_BYTES = {"Q2_K": 84, "Q3_K": 110, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
SCALED_IN_32 = ("Q4_K", "Q5_K")
"""Types that fit MLX's groups, but for the rounding of their scales."""


def dequantize(blocks: Bytes, kind: str) -> Floats:
    """`[rows, blocks, 256]` float32 of `[rows, blocks, bytes]`."""
    if kind in SCALED_IN_32:
        scales, biases = scales_and_biases(blocks, kind)
        return _whole(scales[..., None] * codes(blocks, kind).astype(np.float32) + biases[..., None])
    return {"Q2_K": _q2, "Q3_K": _q3, "Q6_K": _q6}[kind](blocks)


def scales_and_biases(blocks: Bytes, kind: str) -> tuple[Floats, Floats]:
    """Of each 32 values of Q4_K and Q5_K, `[rows, blocks, 8]`; a product of a float16 and a 6-bit number each."""
    factors, leasts = _six_bits(blocks[..., 4:16])
    return _half(blocks, 0) * factors, -(_half(blocks, 2) * leasts)


def codes(blocks: Bytes, kind: str) -> Bytes:
    """Unsigned codes of Q4_K and Q5_K, `[rows, blocks, 8, 32]`."""
    nibbles = blocks[..., 16 if kind == "Q4_K" else 48 :].reshape(*blocks.shape[:2], 4, 1, 32)
    low = _spread(nibbles, (0, 4), 0x0F).reshape(*blocks.shape[:2], 8, 32)
    if kind == "Q4_K":
        return low
    high = _spread(blocks[..., 16:48].reshape(*blocks.shape[:2], 1, 32), range(8), 1)
    return low | (high << np.uint8(4))


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight scales and eight least values, six bits each, out of 12 bytes."""
    first, second, rest = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    factors = np.concatenate([first & 0x3F, (rest & 0x0F) | ((first >> 2) & 0x30)], axis=-1)
    leasts = np.concatenate([second & 0x3F, (rest >> 4) | ((second >> 2) & 0x30)], axis=-1)
    return factors.astype(np.float32), leasts.astype(np.float32)


def _q2(blocks: Bytes) -> Floats:
    """Groups of 16 with a scale and a least value of four bits each."""
    packed = blocks[..., 0:16]
    scales = _half(blocks, 80) * (packed & 0x0F).astype(np.float32)
    leasts = _half(blocks, 82) * (packed >> 4).astype(np.float32)
    quarters = _spread(blocks[..., 16:80].reshape(*blocks.shape[:2], 2, 1, 32), (0, 2, 4, 6), 3)
    values = quarters.reshape(*blocks.shape[:2], 16, 16).astype(np.float32)
    return _whole(scales[..., None] * values - leasts[..., None])


def _q3(blocks: Bytes) -> Floats:
    """Groups of 16 with a signed scale of six bits; a cleared high bit takes four off."""
    low = _spread(blocks[..., 96:104].reshape(*blocks.shape[:2], 1, 8), (0, 4), 0x0F)
    high = _spread(blocks[..., 104:108].reshape(*blocks.shape[:2], 1, 4), (0, 2, 4, 6), 3)
    packed = low.reshape(*blocks.shape[:2], 16) | (high.reshape(*blocks.shape[:2], 16) << np.uint8(4))
    scales = _half(blocks, 108) * (packed.astype(np.int8) - np.int8(32)).astype(np.float32)
    quarters = _spread(blocks[..., 32:96].reshape(*blocks.shape[:2], 2, 1, 32), (0, 2, 4, 6), 3)
    tops = _spread(blocks[..., 0:32].reshape(*blocks.shape[:2], 1, 32), range(8), 1)
    signed = quarters.reshape(*blocks.shape[:2], 256).astype(np.int8)
    signed -= ((tops.reshape(*blocks.shape[:2], 256) ^ 1) << 2).astype(np.int8)
    return _whole(scales[..., None] * signed.reshape(*blocks.shape[:2], 16, 16).astype(np.float32))


def _q6(blocks: Bytes) -> Floats:
    """Groups of 16 with a signed scale of eight bits, codes from -32 to 31."""
    low = _spread(blocks[..., 0:128].reshape(*blocks.shape[:2], 2, 1, 64), (0, 4), 0x0F)
    high = _spread(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32), (0, 2, 4, 6), 3)
    whole = low.reshape(*blocks.shape[:2], 256) | (high.reshape(*blocks.shape[:2], 256) << np.uint8(4))
    signed = (whole.astype(np.int8) - np.int8(32)).astype(np.float32)
    scales = _half(blocks, 208) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return _whole(scales[..., None] * signed.reshape(*blocks.shape[:2], 16, 16))


def _spread(packed: Bytes, shifts: Any, mask: int) -> Bytes:
    """Fields of each byte: the last axis but one, of length 1, becomes that of the shifts."""
    by = np.array(list(shifts), np.uint8)[:, None]
    spread: Bytes = (packed >> by) & np.uint8(mask)
    return spread


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, `[rows, blocks, 1]`."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _whole(groups: Floats) -> Floats:
    return groups.reshape(*groups.shape[:2], 256)
