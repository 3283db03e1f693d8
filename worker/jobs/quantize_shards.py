"""The weights of the result, shard by shard: what is written appears whole and stays, so that a killed job goes on.

A module is read, quantized and written before the next one is read. In memory at most: one module, and the scales of
one shard.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from worker.jobs.safetensors_writer import Buffer, Planned, write_file
from worker.layers.linear import Scheme
from worker.quantize.layout import Source

SHARD_BYTES = 1 << 30
"""Smaller than is usual, because what a killed job loses is a shard."""

_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
    mx.int32: "I32",
    mx.int64: "I64",
}


@dataclass(frozen=True)
class Shard:
    """A file of the result and the tensors in it."""

    file: str
    tensors: tuple[Planned, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def plan(source: Source, schemes: Mapping[str, Scheme], most: int) -> list[Shard]:
    """The files of the result. The tensors of a module are in one of them; their order is that of the names."""
    groups: list[list[Planned]] = []
    filled = 0
    for name in source.tensors:
        tensors = _planned(source, name, schemes)
        size = sum(tensor.num_bytes for tensor in tensors)
        if not groups or (filled and filled + size > most):
            groups.append([])
            filled = 0
        groups[-1] += tensors
        filled += size
    if len(groups) == 1:
        return [Shard("model.safetensors", tuple(groups[0]))]
    return [
        Shard(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for number, group in enumerate(groups, 1)
    ]


def write_all(
    shards: Sequence[Shard],
    folder: Path,
    on_tensor: Callable[[int], None],
    on_shard: Callable[[int], None],
) -> None:
    """Write the shards that are not in `folder` yet. `on_tensor(bytes so far)` may raise to stop, `on_shard(count)`."""
    done = 0
    for number, shard in enumerate(shards, 1):
        target = folder / shard.file
        if not target.exists():
            begun = target.with_suffix(".part")
            written = done

            def told(tensor: Planned) -> None:
                nonlocal written
                on_tensor(written)
                written += tensor.num_bytes

            try:
                write_file(begun, shard.tensors, told, {"format": "mlx"})
                _settle(begun, target)
            except BaseException:
                begun.unlink(missing_ok=True)
                raise
            mx.clear_cache()
        done += shard.num_bytes
        on_shard(number)
    on_tensor(done)


def weight_map(shards: Sequence[Shard]) -> dict[str, str]:
    """Names of tensors to files, as an index has it."""
    return dict(sorted((tensor.name, shard.file) for shard in shards for tensor in shard.tensors))


def _settle(begun: Path, target: Path) -> None:
    with begun.open("rb") as file:
        os.fsync(file.fileno())
    begun.rename(target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _planned(source: Source, name: str, schemes: Mapping[str, Scheme]) -> list[Planned]:
    """What a tensor of the source becomes."""
    tensor = source.tensors[name]
    module, _, leaf = name.rpartition(".")
    scheme = schemes.get(module) if leaf == "weight" else None
    if scheme is None:
        return [Planned(name, _NAMES[tensor.dtype], tensor.shape, lambda: _raw(source.tensors.pop(name)))]
    made: dict[str, mx.array] = {}

    def part(leaf: str) -> Iterator[Buffer]:
        if not made:
            made.update(_quantized(source.tensors.pop(name), scheme))
        return _raw(made.pop(leaf))

    rows, inputs = tensor.shape[:-1], tensor.shape[-1]
    groups = (*rows, inputs // scheme.group_size)
    leaves = {"weight": ("U32", (*rows, inputs * scheme.bits // 32))}
    if scheme.mode == "affine":
        leaves |= {"scales": (_NAMES[tensor.dtype], groups), "biases": (_NAMES[tensor.dtype], groups)}
    else:
        leaves["scales"] = ("U8", groups)
    return [
        Planned(f"{module}.{leaf}", dtype, shape, lambda leaf=leaf: part(leaf))  # type: ignore[misc]
        for leaf, (dtype, shape) in leaves.items()
    ]


def _quantized(weight: mx.array, scheme: Scheme) -> dict[str, mx.array]:
    parts = mx.quantize(weight, scheme.group_size, scheme.bits, mode=scheme.mode)
    made = dict(zip(("weight", "scales", "biases"), parts, strict=False))
    mx.eval(list(made.values()))
    return made


def _raw(tensor: mx.array) -> Iterator[Buffer]:
    if tensor.size:
        raw = mx.contiguous(tensor).reshape(-1).view(mx.uint8)
        yield memoryview(raw)  # type: ignore[arg-type]
