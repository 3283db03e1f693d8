"""The GGUF header reader: what was written is read, what is damaged is refused in a line."""

import contextlib
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.jobs.gguf_files import Raw, blocks, encode, floats, text
from worker.jobs.gguf import GgufError, Unsupported, parse
from worker.jobs.gguf_blocks import biases_of, dequantize, packed, row_view, scales_of, to_dtype

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.count": 7,
    "a.share": 0.5,
    "a.words": ["x", "yé", ""],
    "a.numbers": [1, -2],
    "a.shares": [0.25, 4.0],
}


def sample() -> dict[str, Raw]:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    return {
        "matrix": floats("F32", grid),
        "vector": floats("F16", np.array([1.5, -2, 0.25])),
        "packed": blocks("Q4_0", (2, 64), 1),
    }


@pytest.mark.parametrize("alignment", [32, 64])
@pytest.mark.parametrize("version", [2, 3])
def test_what_was_written_is_read(version: int, alignment: int) -> None:
    metadata = {**METADATA, "general.alignment": alignment}
    data = encode(metadata, sample(), version=version, alignment=alignment)
    found = parse(memoryview(data))
    assert found.version == version
    assert found.metadata == metadata
    for name, raw in sample().items():
        tensor = found.tensors[name]
        assert (tensor.shape, tensor.type.name) == (raw.shape, raw.kind)
        assert data[tensor.offset : tensor.offset + tensor.num_bytes] == raw.data


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_values_are_those_of_the_definition(kind: str) -> None:
    raw = (
        blocks(kind, (5, 96), 3)
        if kind.startswith("Q")
        else floats(kind, np.random.RandomState(1).uniform(-3, 3, (5, 96)).astype(np.float32))
    )
    data = encode(METADATA, {"m": raw})
    rows = row_view(np.frombuffer(data, np.uint8), parse(memoryview(data)).tensors["m"])
    assert np.array_equal(dequantize(rows, kind), raw.values)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q8_0", 8)])
def test_repacked_blocks_mean_the_same_to_mlx(kind: str, bits: int) -> None:
    import mlx.core as mx

    raw = blocks(kind, (6, 128), 5)
    rows = np.frombuffer(raw.data, np.uint8).reshape(6, -1)
    parts = (packed(rows, kind), scales_of(rows, kind), biases_of(rows, kind))
    found = mx.dequantize(*(mx.array(part) for part in parts), group_size=32, bits=bits)
    assert np.array_equal(np.array(found), raw.values)


def test_bfloat16_is_rounded_to_nearest_even() -> None:
    import mlx.core as mx

    values = np.concatenate(
        [np.random.RandomState(2).standard_normal(1000), [1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, 3e38, 1e-40]]
    ).astype(np.float32)
    expected = mx.array(values).astype(mx.bfloat16).view(mx.uint16)
    assert np.array_equal(to_dtype(values, "bfloat16"), np.array(expected))


def with_tensor(kind: int = 0, shape: tuple[int, ...] = (4,), offset: int = 0, times: int = 1) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, times, 0)
    info = text("t") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)
    head += info * times
    return head + b"\0" * (-len(head) % 32) + b"\0" * 64


DAMAGED: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "truncated: the magic"),
    "other file": (b"PK\3\4" + b"\0" * 64, "not a GGUF file"),
    "only the magic": (b"GGUF", "truncated: the version"),
    "endless metadata": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "truncated"),
    "endless tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "truncated"),
    "endless key": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**60), "damaged"),
    "endless string": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IQ", 8, 2**62),
        "truncated: k needs",
    ),
    "endless list of strings": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**62),
        "truncated: metadata k announces",
    ),
    "endless list of numbers": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<IIQ", 9, 4, 2**62),
        "truncated: k needs",
    ),
    "nested too deeply": (
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + text("k")
        + struct.pack("<I", 9)
        + struct.pack("<IQ", 9, 1) * 5,
        "nests arrays too deeply",
    ),
    "unknown value type": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("k") + struct.pack("<I", 99),
        "unknown type 99",
    ),
    "key not UTF-8": (
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xff" + struct.pack("<II", 4, 1),
        "not UTF-8",
    ),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("k") + struct.pack("<II", 4, 1)) * 2,
        "'k' comes twice",
    ),
    "alignment": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("general.alignment") + struct.pack("<II", 4, 3),
        "not a power of two",
    ),
    "tensor twice": (with_tensor(times=2), "tensor t comes twice"),
    "tensor not aligned": (with_tensor(offset=4), "not aligned"),
    "tensor past the end": (with_tensor(shape=(400,)), "truncated: tensor t ends at byte"),
    "huge tensor": (with_tensor(shape=(2**62, 2**62)), "truncated: tensor t"),
    "too many dimensions": (with_tensor(shape=(1, 1, 1, 1, 1)), "has 5 dimensions"),
    "no values": (with_tensor(shape=(0, 4)), r"shape \[0, 4\]"),
    "part of a block": (with_tensor(kind=2, shape=(2, 33)), "which Q4_0 cannot hold"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused(name: str) -> None:
    data, message = DAMAGED[name]
    with pytest.raises(GgufError, match=message) as caught:
        parse(memoryview(data))
    assert not isinstance(caught.value, Unsupported)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1; versions 2 and 3"),
        (with_tensor(kind=17), "tensor t is of type IQ2_XS.*accepted are F32, F16, Q4_0, Q4_1, Q5_0"),
        (with_tensor(kind=17), "of type IQ2_XS"),
        (with_tensor(kind=200), "unknown number 200"),
    ],
)
def test_files_of_other_kinds_are_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        parse(memoryview(data))


@given(cut=st.integers(0, 2000))
def test_a_file_cut_anywhere_is_refused(cut: int) -> None:
    data = encode(METADATA, sample())
    if cut < len(data):
        with pytest.raises(GgufError):
            parse(memoryview(data[:cut]))


@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300)
def test_a_file_with_any_bytes_changed_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    data = bytearray(encode(METADATA, sample()))
    for place, byte in changes:
        data[place % len(data)] = byte
    with contextlib.suppress(GgufError):
        found = parse(memoryview(data))
        assert all(each.offset + each.num_bytes <= len(data) for each in found.tensors.values())


@given(data=st.binary(max_size=200))
def test_any_bytes_after_the_magic_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(GgufError):
        parse(memoryview(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + data))
