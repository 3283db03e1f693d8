"""Writes safetensors files piece by piece, so that a model larger than memory can be written.

The safetensors library wants every tensor of a file in memory at once. Layout: see `shared.tensor_headers`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.tensor_headers import DTYPE_BYTES

MAX_SHARD_BYTES = 5_000_000_000

Buffer = bytes | memoryview


@dataclass(frozen=True)
class Planned:
    """A tensor to write: safetensors dtype name, shape, and where its bytes come from, in pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Buffer]]

    @property
    def num_bytes(self) -> int:
        total = DTYPE_BYTES[self.dtype]
        for n in self.shape:
            total *= n
        return total


def write(
    folder: Path,
    tensors: Sequence[Planned],
    *,
    on_tensor: Callable[[Planned], None],
    metadata: dict[str, str],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `model.safetensors`, or shards with an index when it would be too large.

    `on_tensor` is called before each tensor. Raises ValueError when a tensor's pieces do not add up.
    """
    shards = _split(tensors, max_shard_bytes)
    if len(shards) == 1:
        write_file(folder / "model.safetensors", shards[0], on_tensor, metadata)
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard, on_tensor, metadata)
        weight_map.update({tensor.name: file for tensor in shard})
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in tensors)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _split(tensors: Sequence[Planned], limit: int) -> list[list[Planned]]:
    shards: list[list[Planned]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and filled + tensor.num_bytes > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.num_bytes
    return shards


def write_file(
    path: Path, tensors: Sequence[Planned], on_tensor: Callable[[Planned], None], metadata: dict[str, str]
) -> None:
    """One file of them all; else as `write`."""
    header: dict[str, object] = {"__metadata__": metadata}
    # wide types first, as the library does: then every tensor is aligned to its own size
    ordered = sorted(tensors, key=lambda one: -DTYPE_BYTES[one.dtype])
    at = 0
    for tensor in ordered:
        end = at + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in ordered:
            on_tensor(tensor)
            written = 0
            for piece in tensor.pieces():
                written += file.write(piece)
            if written != tensor.num_bytes:
                raise ValueError(f"{tensor.name}: {written} bytes instead of {tensor.num_bytes}")
