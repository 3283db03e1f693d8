"""The header of a GGUF file: metadata and where each tensor lies. Pure: bytes in, a description out.

Format: magic `GGUF`, version, counts, typed key-value pairs, tensor infos, then the data, aligned. Source:
the specification in ggml's `docs/gguf.md`. Every length is checked against what is left of the file before
anything of that size is made.
"""

import array
import math
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_DIMS = 4
MAX_DEPTH = 2  # arrays of arrays
MAX_NAME = 1 << 16
DEFAULT_ALIGNMENT = 32


class GgufError(ValueError):
    """What is wrong with the file, in one line without its name."""


class Unsupported(GgufError):
    """The file is well, but of a kind that cannot be converted."""


@dataclass(frozen=True)
class TensorType:
    """`block` values take `num_bytes` bytes."""

    name: str
    block: int
    num_bytes: int


TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""The tensor types that can be converted, by the number they have in the file."""

OTHER_TYPES: Mapping[int, str] = {
    9: "Q8_1",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
}
"""Names of the others, to refuse them by."""


@dataclass(frozen=True)
class GgufTensor:
    """`shape` is row-major (the file has it reversed); `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Gguf:
    """A parsed header."""

    version: int
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def parse(data: memoryview) -> Gguf:
    """Parse a whole file's bytes (a memory map: only the header is read). Raises `GgufError`."""
    cursor = _Cursor(data)
    if bytes(cursor.take(4, "the magic")) != b"GGUF":
        raise GgufError("not a GGUF file")
    version = cursor.u32("the version")
    if version and version % 65536 == 0:
        raise Unsupported("a big-endian GGUF file; only little-endian ones are read")
    if version not in (2, 3):
        raise Unsupported(f"GGUF version {version}; versions 2 and 3 are read")
    num_tensors = cursor.u64("the tensor count")
    num_pairs = cursor.u64("the metadata count")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.text("a metadata key", MAX_NAME)
        if key in metadata:
            raise GgufError(f"metadata key {key!r} comes twice")
        metadata[key] = cursor.value(key)
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise GgufError(f"general.alignment is {alignment!r}, not a power of two")
    start = (cursor.at + alignment - 1) // alignment * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, number, offset in infos:
        if name in tensors:
            raise GgufError(f"tensor {name} comes twice")
        if offset % alignment:
            raise GgufError(f"tensor {name} starts at {offset}, which is not aligned to {alignment}")
        tensors[name] = _place(name, shape, number, start + offset, len(data))
    return Gguf(version, metadata, tensors)


def _tensor_info(cursor: "_Cursor") -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text("a tensor name", MAX_NAME)
    dims = cursor.u32(f"the rank of {name}")
    if not 1 <= dims <= MAX_DIMS:
        raise GgufError(f"tensor {name} has {dims} dimensions; 1 to {MAX_DIMS} are possible")
    shape = [cursor.u64(f"the shape of {name}") for _ in range(dims)]
    number = cursor.u32(f"the type of {name}")
    return name, tuple(reversed(shape)), number, cursor.u64(f"the place of {name}")


def _place(name: str, shape: tuple[int, ...], number: int, offset: int, size: int) -> GgufTensor:
    kind = TYPES.get(number)
    if kind is None:
        known = ", ".join(each.name for each in TYPES.values())
        what = OTHER_TYPES.get(number, f"of the unknown number {number}")
        raise Unsupported(f"tensor {name} is of type {what}, which cannot be converted; accepted are {known}")
    count = math.prod(shape)
    if count == 0 or shape[-1] % kind.block:
        raise GgufError(f"tensor {name} has shape {list(shape)}, which {kind.name} cannot hold")
    num_bytes = count // kind.block * kind.num_bytes
    if offset + num_bytes > size:
        raise GgufError(f"truncated: tensor {name} ends at byte {offset + num_bytes}, the file has {size}")
    return GgufTensor(name, shape, kind, offset, num_bytes)


# ---------------------------------------------------------------- reading values

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


class _Cursor:
    """A place in the bytes; every step is checked against their end."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int, what: str) -> memoryview:
        end = self.at + count
        if end > len(self.data):
            raise GgufError(f"truncated: {what} needs {end} bytes, the file has {len(self.data)}")
        part = self.data[self.at : end]
        self.at = end
        return part

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise GgufError(f"{what} has {length} bytes; the file is damaged")
        try:
            return str(self.take(length, what), "utf-8")
        except UnicodeDecodeError:
            raise GgufError(f"{what} is not UTF-8") from None

    def value(self, key: str) -> Any:
        return self._value(self.u32(key), key, 0)

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind in _SCALARS:
            form = _SCALARS[kind]
            return form.unpack(self.take(form.size, key))[0]
        if kind == _STRING:
            return self.text(key)
        if kind != _ARRAY:
            raise GgufError(f"metadata {key} has the unknown type {kind}")
        if depth >= MAX_DEPTH:
            raise GgufError(f"metadata {key} nests arrays too deeply")
        inner, count = self.u32(key), self.u64(key)
        if inner in _SCALARS:
            form = _SCALARS[inner]
            return _numbers(form, self.take(count * form.size, key))
        read: Callable[[], Any] = (
            (lambda: self.text(key)) if inner == _STRING else (lambda: self._value(inner, key, depth + 1))
        )
        least = 8 if inner == _STRING else 12  # bytes that one element takes at least
        if count * least > len(self.data) - self.at:
            raise GgufError(f"truncated: metadata {key} announces {count} elements")
        return [read() for _ in range(count)]


def _numbers(form: struct.Struct, part: memoryview) -> list[Any]:
    code = form.format[1:]
    if code == "?":
        return [bool(byte) for byte in part]
    values = array.array(code, bytes(part))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
