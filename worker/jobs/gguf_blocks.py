"""GGUF tensor data as numpy arrays: dequantized, or as MLX's quantization, with what that loses.

A block of 32 values that is `scale * q + bias` is MLX's `affine` mode with groups of 32, so nothing is rounded again:
Q4_0 has bias -8 scale, Q8_0 (signed) becomes bias -128 scale. Q4_K and Q5_K keep their codes, and their scales are
rounded once. The other k-quants are multiplied out and quantized anew. MXFP4 is MLX's mode of that name. Rows are
handled in slabs; `rows` of the file is a byte view `[rows, bytes a row]`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.jobs import gguf_kquants
from worker.jobs.gguf import GgufTensor

GROUP = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5, "MXFP4": 4}
"""The types whose codes MLX takes as they are, and how many bits a value takes."""

ANEW = {"Q2_K": 4, "Q3_K": 4, "Q6_K": 6}
"""Those that are quantized anew, and to how many bits."""

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "MXFP4": 17}
_HALF_CENTRES = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Scheme:
    """How MLX is to keep a tensor: `affine` with scales and biases, or `mxfp4` with scales only."""

    mode: str
    bits: int

    def entry(self) -> dict[str, Any]:
        """As config.json has it."""
        return {"group_size": GROUP, "bits": self.bits, "mode": self.mode}


@dataclass(frozen=True)
class Parts:
    """Rows as MLX keeps them: packed weights, scales (of mxfp4 powers of two, a byte each), biases (affine)."""

    weight: NDArray[np.uint32]
    scales: NDArray[Any]
    biases: Floats | None


def scheme_of(kind: str) -> Scheme | None:
    """What a tensor of this type becomes when its quantization is kept; None for plain numbers."""
    if kind in BITS or kind in ANEW:
        return Scheme("mxfp4" if kind == "MXFP4" else "affine", BITS.get(kind) or ANEW[kind])
    return None


def is_exact(kind: str, dtype: str) -> bool:
    """Whether a kept tensor means exactly the same, with scales of this type."""
    return kind not in ANEW and (kind not in gguf_kquants.SCALED_IN_32 or dtype == "float32")


def row_view(data: Bytes, tensor: GgufTensor) -> Bytes:
    """The tensor's bytes `[rows, bytes a row]`, a view of the mapped file; a vector is one row."""
    rows = 1
    for count in tensor.shape[:-1]:
        rows *= count
    return data[tensor.offset : tensor.offset + tensor.num_bytes].reshape(rows, -1)


def is_sound(made: Parts) -> bool:
    """Whether scales and biases are numbers: of mxfp4 all powers of two are but the last, which means none."""
    if made.biases is None:
        return bool((made.scales != 0xFF).all())
    return bool(np.isfinite(made.scales).all() and np.isfinite(made.biases).all())


def dequantize(rows: Bytes, kind: str) -> Floats:
    """`[rows, values]` float32, exactly what the file's numbers mean."""
    if kind == "F32":
        return np.ascontiguousarray(rows).view("<f4").astype(np.float32, copy=False)
    if kind == "F16":
        return np.ascontiguousarray(rows).view("<f2").astype(np.float32)
    if kind == "BF16":
        return (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)
    if kind in gguf_kquants.BLOCK_BYTES:
        return gguf_kquants.dequantize(_blocks(rows, kind), kind).reshape(len(rows), -1)
    if kind == "MXFP4":
        powers = np.ldexp(np.float32(1), _blocks(rows, kind)[..., 0].astype(np.int32) - 127)
        return (_FP4[_codes(rows, kind)] * powers[..., None]).reshape(len(rows), -1).astype(np.float32)
    values = _codes(rows, kind).astype(np.float32)
    values *= scales_of(rows, kind)[..., None]
    values += biases_of(rows, kind)[..., None]
    return values.reshape(len(rows), -1)


def parts(rows: Bytes, kind: str) -> Parts:
    """The rows as MLX keeps them."""
    if kind in ANEW:
        return _anew(dequantize(rows, kind), ANEW[kind])
    if kind == "MXFP4":
        return Parts(packed(rows, kind), np.ascontiguousarray(_blocks(rows, kind)[..., 0]), None)
    return Parts(packed(rows, kind), scales_of(rows, kind), biases_of(rows, kind))


def meant(made: Parts, dtype: str, bits: int) -> Floats:
    """`[rows, values]`: what affine parts mean once scales and biases are of this type."""
    import mlx.core as mx  # only here and below: a job that keeps no quantization does without

    assert made.biases is not None
    scales, biases = (
        mx.array(np.asarray(each)).astype(getattr(mx, dtype)) for each in (made.scales, made.biases)
    )
    wide = (scales.astype(mx.float32), biases.astype(mx.float32))
    return np.array(mx.dequantize(mx.array(made.weight), *wide, group_size=GROUP, bits=bits))


def packed(rows: Bytes, kind: str) -> NDArray[np.uint32]:
    """MLX's packed weights `[rows, values * bits / 32]`: a stream of bits, the first value in the lowest."""
    return _packed(_codes(rows, kind).reshape(len(rows), -1), BITS[kind])


def scales_of(rows: Bytes, kind: str) -> Floats:
    """`[rows, groups]`."""
    if kind in gguf_kquants.SCALED_IN_32:
        return gguf_kquants.scales_and_biases(_blocks(rows, kind), kind)[0].reshape(len(rows), -1)
    return _halves(_blocks(rows, kind)[..., 0:2])


def biases_of(rows: Bytes, kind: str) -> Floats:
    """`[rows, groups]`; scaling by a power of two, so exact."""
    if kind in gguf_kquants.SCALED_IN_32:
        return gguf_kquants.scales_and_biases(_blocks(rows, kind), kind)[1].reshape(len(rows), -1)
    if kind in ("Q4_1", "Q5_1"):
        return _halves(_blocks(rows, kind)[..., 2:4])
    return scales_of(rows, kind) * np.float32(-_HALF_CENTRES[kind])


def to_dtype(values: Floats, dtype: str) -> NDArray[Any]:
    """float32 values as `dtype`; bfloat16 (uint16 bits, numpy has no such type) to nearest, ties to even."""
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _anew(values: Floats, bits: int) -> Parts:
    import mlx.core as mx

    weight, scales, biases = mx.quantize(mx.array(values), GROUP, bits)
    return Parts(np.array(weight), np.array(scales), np.array(biases))


def _packed(codes: Bytes, bits: int) -> NDArray[np.uint32]:
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4")
    if bits == 4:
        return np.ascontiguousarray(codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))).view("<u4")
    fields = np.unpackbits(codes[..., None], axis=-1, count=bits, bitorder="little")
    stream: Bytes = np.packbits(fields.reshape(len(codes), -1), axis=-1, bitorder="little")
    return stream.view("<u4")


def _blocks(rows: Bytes, kind: str) -> Bytes:
    size = _BLOCK_BYTES.get(kind) or gguf_kquants.BLOCK_BYTES[kind]
    return rows.reshape(len(rows), -1, size)


def _codes(rows: Bytes, kind: str) -> Bytes:
    """Unsigned codes `[rows, groups, 32]`. In a 4-bit block the low nibbles are the first 16 values."""
    blocks = _blocks(rows, kind)
    if kind in gguf_kquants.SCALED_IN_32:
        return gguf_kquants.codes(blocks, kind).reshape(len(rows), -1, GROUP)
    if kind == "Q8_0":
        return blocks[..., 2:] ^ np.uint8(0x80)
    nibbles = blocks[..., -16:]
    low = np.concatenate([nibbles & np.uint8(0x0F), nibbles >> np.uint8(4)], axis=-1)
    if kind not in ("Q5_0", "Q5_1"):
        return low
    at = 2 if kind == "Q5_0" else 4
    fifths = np.unpackbits(blocks[..., at : at + 4], axis=-1, bitorder="little")
    whole: Bytes = low | (fifths << np.uint8(4))
    return whole


def _halves(pairs: Bytes) -> Floats:
    return np.ascontiguousarray(pairs).view("<f2")[..., 0].astype(np.float32)
