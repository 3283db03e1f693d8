"""Blocks of every quantized type against the `gguf` package of llama.cpp, and what MLX makes of them."""

import gguf as reference
import mlx.core as mx
import numpy as np
import pytest

from worker.jobs import gguf_blocks
from worker.jobs.gguf import TYPES

KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "MXFP4"]
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
LOSSES = {"Q4_K": 1e-3, "Q5_K": 1e-3, "Q6_K": 0.02, "Q3_K": 0.09, "Q2_K": 0.12}


def sample(kind: str, rows: int = 6, values: int = 512) -> np.ndarray:
    """Random bytes as blocks, every bit pattern as likely, with scales that are numbers of a weight's size."""
    size = next(each for each in TYPES.values() if each.name == kind)
    random = np.random.RandomState(len(kind) + size.num_bytes)
    blocks = random.randint(0, 256, (rows, values // size.block, size.num_bytes)).astype(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = random.randint(118, 124, blocks.shape[:2])
    else:
        for at in HALVES.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,)):
            scales = random.uniform(0.001, 0.01, (*blocks.shape[:2], 1)).astype("<f2")
            blocks[..., at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_oracle_blocks_mean_what_llama_cpp_says(kind: str) -> None:
    rows = sample(kind)
    expected = reference.quants.dequantize(rows, reference.GGMLQuantizationType[kind])
    found = gguf_blocks.dequantize(rows, kind)
    assert found.dtype == np.float32
    assert np.abs(expected).max() > 0.01
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_what_mlx_keeps_with_float32_scales_is_exactly_the_same(kind: str) -> None:
    rows = sample(kind)
    made = gguf_blocks.parts(rows, kind)
    plain = gguf_blocks.meant(made, "float32", gguf_blocks.BITS[kind])
    assert gguf_blocks.is_exact(kind, "float32")
    assert (
        np.abs(plain - gguf_blocks.dequantize(rows, kind)).max() <= 1e-7
    )  # scale * q + bias in one rounding or two


def test_mxfp4_is_mlx_s_own() -> None:
    rows = sample("MXFP4")
    made = gguf_blocks.parts(rows, "MXFP4")
    assert made.biases is None
    plain = mx.dequantize(
        mx.array(made.weight), mx.array(made.scales), None, 32, 4, mode="mxfp4", dtype=mx.float32
    )
    assert np.array_equal(np.array(plain), gguf_blocks.dequantize(rows, "MXFP4"))


@pytest.mark.parametrize("kind", LOSSES)
def test_what_is_quantized_anew_or_rounded_loses_as_little_as_is_said(kind: str) -> None:
    rows = sample(kind, 8, 1024)
    values = gguf_blocks.dequantize(rows, kind)
    scheme = gguf_blocks.scheme_of(kind)
    assert scheme is not None
    plain = gguf_blocks.meant(gguf_blocks.parts(rows, kind), "float16", scheme.bits)
    loss = float(np.linalg.norm(plain - values) / np.linalg.norm(values))
    assert 0 < loss < LOSSES[kind]
    assert not gguf_blocks.is_exact(kind, "float16")
