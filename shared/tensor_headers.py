"""Safetensors headers: names, dtypes and shapes of the tensors in a file, checked, without reading a tensor.

The file format: 8 bytes little-endian length of the header, the header as one JSON object of
`name: {dtype, shape, data_offsets: [begin, end]}` (offsets count from the end of the header), then the data.
"""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ErrorCode, Refused, refuse
from shared.files import decode_json, open_regular

MAX_HEADER = 100_000_000
"""Bytes; the limit the safetensors library itself has."""

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor as its header describes it: safetensors dtype name, shape, payload bytes, file name."""

    dtype: str
    shape: list[int]
    num_bytes: int
    file: str


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file. Raises `Refused` (bad_checkpoint): the file and its fault."""
    try:
        file = open_regular(path)
    except OSError as error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: cannot be read ({error.strerror})") from None
    with file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _bad(path, f"has {size} bytes, too few for a safetensors file; download it again")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER:
            raise _bad(path, f"announces a header of {length} bytes; it is not a safetensors file")
        raw = file.read(length)
    if len(raw) < length:
        raise _truncated(path, 8 + length, size)
    try:
        header = decode_json(raw)
    except ValueError as error:
        raise _bad(path, f"has a header that is not JSON ({error}); download it again") from None
    if not isinstance(header, dict):
        raise _bad(path, "has a header that is not a JSON object; download it again")
    header.pop("__metadata__", None)
    return _check(path, header, data_start=8 + length, size=size)


def _check(path: Path, header: dict[str, Any], *, data_start: int, size: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, raw in header.items():
        try:
            entry = msgspec.convert(raw, _Entry)
        except msgspec.ValidationError as error:
            raise _bad(path, f"describes tensor {name} wrongly ({error}); download it again") from None
        if entry.dtype not in DTYPE_BYTES:
            raise _bad(path, f"holds tensor {name} of dtype {entry.dtype}, which this server cannot read")
        if any(n < 0 for n in entry.shape):
            raise _bad(path, f"gives tensor {name} the shape {entry.shape}; download it again")
        begin, end = entry.data_offsets
        expected = DTYPE_BYTES[entry.dtype]
        for n in entry.shape:
            expected *= n
        if begin < 0 or end - begin != expected:
            raise _bad(
                path,
                f"gives tensor {name} the bytes {begin} to {end}, but {entry.dtype} {entry.shape} "
                f"takes {expected}; download it again",
            )
        spans.append((begin, end, name))
        tensors[name] = TensorInfo(entry.dtype, entry.shape, expected, path.name)
    spans.sort()
    for (_, end, first), (begin, _, second) in pairwise(spans):
        if begin < end:
            raise _bad(path, f"lets tensors {first} and {second} overlap; download it again")
    if spans and data_start + spans[-1][1] > size:
        raise _truncated(path, data_start + spans[-1][1], size)
    return tensors


def _bad(path: Path, fault: str) -> Refused:
    line = f"{path}: the file {fault}".replace("\n", " ")  # names of tensors come from the file
    return refuse(ErrorCode.BAD_CHECKPOINT, line)


def _truncated(path: Path, expected: int, found: int) -> Refused:
    return refuse(
        ErrorCode.BAD_CHECKPOINT,
        f"{path}: truncated, expected {expected} bytes, found {found}; download the file again",
    )
