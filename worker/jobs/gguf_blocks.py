"""GGUF tensor data as numpy arrays: dequantized, or repacked as MLX's affine quantization, bit for bit.

A block of 32 values is `scale * q + bias` in all three quantized types, which is MLX's `affine` mode with
groups of 32, so nothing is rounded again: Q4_0 has bias -8 scale, Q8_0 (signed) becomes bias -128 scale. Rows
are handled in slabs; `rows` of the file is a byte view `[rows, bytes a row]`.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.jobs.gguf import GgufTensor

GROUP = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""The quantized types and how many bits a value takes."""

Bytes = NDArray[np.uint8]


def row_view(data: Bytes, tensor: GgufTensor) -> Bytes:
    """The tensor's bytes `[rows, bytes a row]`, a view of the mapped file; a vector is one row."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    return data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(rows, -1)


def dequantize(rows: Bytes, kind: str) -> NDArray[np.float32]:
    """`[rows, values]` float32, exactly what the file's numbers mean."""
    if kind == "F32":
        return np.ascontiguousarray(rows).view("<f4").astype(np.float32, copy=False)
    if kind == "F16":
        return np.ascontiguousarray(rows).view("<f2").astype(np.float32)
    if kind == "BF16":
        return (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)
    scales, biases = scales_of(rows, kind), biases_of(rows, kind)
    values = _codes(rows, kind).astype(np.float32)
    values *= scales[..., None]
    values += biases[..., None]
    return values.reshape(len(rows), -1)


def packed(rows: Bytes, kind: str) -> NDArray[np.uint32]:
    """MLX's packed weights `[rows, values * bits / 32]`, the first value in the lowest bits."""
    codes = _codes(rows, kind)
    if BITS[kind] == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return np.ascontiguousarray(codes).reshape(len(rows), -1).view("<u4")


def scales_of(rows: Bytes, kind: str) -> NDArray[np.float32]:
    """`[rows, groups]`."""
    return _halves(_blocks(rows, kind)[..., 0:2])


def biases_of(rows: Bytes, kind: str) -> NDArray[np.float32]:
    """`[rows, groups]`; scaling by a power of two, so exact."""
    if kind == "Q4_1":
        return _halves(_blocks(rows, kind)[..., 2:4])
    return scales_of(rows, kind) * np.float32(-8 if kind == "Q4_0" else -128)


def to_dtype(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """float32 values as `dtype`; bfloat16 (uint16 bits, numpy has no such type) to nearest, ties to even."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _blocks(rows: Bytes, kind: str) -> Bytes:
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    return rows.reshape(len(rows), -1, size)


def _codes(rows: Bytes, kind: str) -> Bytes:
    """Unsigned codes `[rows, groups, 32]`. In a 4-bit block the low nibbles are the first 16 values."""
    blocks = _blocks(rows, kind)
    if kind == "Q8_0":
        return blocks[..., 2:] ^ np.uint8(0x80)
    nibbles = blocks[..., 2 if kind == "Q4_0" else 4 :]
    return np.concatenate([nibbles & np.uint8(0x0F), nibbles >> np.uint8(4)], axis=-1)


def _halves(pairs: Bytes) -> NDArray[np.float32]:
    return np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float32)
