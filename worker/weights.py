"""The weights of a checkpoint on their way into a graph: mapped, checked by name and shape, cast, evaluated.

A family's module takes what it needs by name (`linear`, `embedding`, `vector`); what is missing or has the
wrong shape is refused there, what nobody took is refused by `finish`. Nothing is read from disk before
`materialise`, which evaluates in groups and reports bytes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from shared.checkpoint import Checkpoint
from shared.errors import ErrorCode, Refused, refuse
from worker.layers.linear import (
    DenseEmbedding,
    DenseLinear,
    Embedding,
    Linear,
    QuantizedEmbedding,
    QuantizedLinear,
    Scheme,
)

Progress = Callable[[int, int], None]

GROUP_BYTES = 64 << 20
"""How much is evaluated between two progress reports."""

_DEFAULT_SCHEME = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
_AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_AFFINE_GROUPS = (32, 64, 128)


class Weights:
    """Tensors of a checkpoint by name, each to be taken once. `dtype`: what floating point tensors become."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self._tensors: dict[str, mx.array] = {}
        self._taken: list[mx.array] = []
        self._quantization: dict[str, Any] = checkpoint.config.get("quantization") or {}
        for shard in checkpoint.shards:
            path = Path(checkpoint.path) / shard.file
            try:
                loaded = mx.load(str(path), format="safetensors")
            except RuntimeError as error:
                reason = str(error).splitlines()[0]
                raise refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: cannot be read ({reason})") from None
            assert isinstance(loaded, dict)
            self._tensors.update(loaded)

    def rename(self, change: Callable[[str], str | None]) -> None:
        """Give every tensor a new name; None drops it. For a family's checkpoint quirks."""
        self._tensors = {new: one for name, one in self._tensors.items() if (new := change(name)) is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def vector(self, name: str, size: int) -> mx.array:
        """A norm's weight or a bias, `[size]`."""
        return self._cast(self._take(name, [size]))

    def linear(self, module: str, in_dim: int, out_dim: int, *, bias: bool = False) -> Linear:
        """The projection `module` with weight `[out_dim, in_dim]`, quantized if the checkpoint says so."""
        parts = self._matrix(module, in_dim, out_dim)
        offset = self.vector(f"{module}.bias", out_dim) if bias else None
        if isinstance(parts, mx.array):
            return DenseLinear(parts, offset)
        weight, scales, biases, scheme = parts
        return QuantizedLinear(weight, scales, biases, scheme, offset)

    def embedding(self, module: str, count: int, dim: int) -> Embedding:
        """The table `module` with weight `[count, dim]`."""
        parts = self._matrix(module, dim, count)
        if isinstance(parts, mx.array):
            return DenseEmbedding(parts)
        return QuantizedEmbedding(*parts, self.dtype)

    def finish(self) -> None:
        """Refuse tensors that nothing of the graph asked for: the graph would be another model's."""
        if self._tensors:
            name = min(self._tensors)
            more = f" and {len(self._tensors) - 1} more" if len(self._tensors) > 1 else ""
            raise self._bad(f"tensor {name}{more} is not part of a {self.checkpoint.model_type} model")

    def materialise(self, on_progress: Progress | None) -> int:
        """Read and cast everything taken; gives its bytes. `on_progress(done, total)` in bytes."""
        total = sum(one.nbytes for one in self._taken)
        done = 0
        group: list[mx.array] = []
        pending = 0
        for one in self._taken:
            group.append(one)
            pending += one.nbytes
            if pending >= GROUP_BYTES:
                mx.eval(group)
                done, pending, group = done + pending, 0, []
                if on_progress:
                    on_progress(done, total)
        mx.eval(group)
        if on_progress:
            on_progress(total, total)
        self._taken = []
        return total

    # ------------------------------------------------------------ inside

    def _matrix(
        self, module: str, in_dim: int, out_dim: int
    ) -> mx.array | tuple[mx.array, mx.array, mx.array | None, Scheme]:
        scheme = self._scheme(module)
        if scheme is None:
            return self._cast(self._take(f"{module}.weight", [out_dim, in_dim]))
        if in_dim % scheme.group_size:
            raise self._bad(f"{module}: {in_dim} inputs do not divide into groups of {scheme.group_size}")
        weight = self._take(f"{module}.weight", [out_dim, in_dim * scheme.bits // 32])
        if weight.dtype != mx.uint32:
            raise self._bad(f"tensor {module}.weight is {weight.dtype}, but quantized weights are uint32")
        shape = [out_dim, in_dim // scheme.group_size]
        scales = self._take(f"{module}.scales", shape)
        if scheme.mode != "affine":
            return self._keep(weight), self._keep(scales), None, scheme
        biases = self._take(f"{module}.biases", shape)
        return self._keep(weight), self._cast(scales), self._cast(biases), scheme

    def _scheme(self, module: str) -> Scheme | None:
        """How `module` is quantized, None if it is not: it must have scales and not be switched off."""
        has_scales = f"{module}.scales" in self._tensors
        override = self._quantization.get(module)
        if override is False or not has_scales:
            if has_scales:
                raise self._bad(f"{module} has scales, but config.json says it is not quantized")
            return None
        if not self._quantization:
            raise self._bad(f"{module} has scales, but config.json has no quantization entry")
        given = {**self._quantization, **(override if isinstance(override, dict) else {})}
        mode = given.get("mode", "affine")
        if mode not in _DEFAULT_SCHEME:
            known = ", ".join(_DEFAULT_SCHEME)
            raise refuse(
                ErrorCode.UNSUPPORTED,
                f"{self.checkpoint.path}: {module} has quantization mode {mode!r}; known are {known}",
            )
        bits, group = (
            given.get("bits", _DEFAULT_SCHEME[mode][0]),
            given.get("group_size", _DEFAULT_SCHEME[mode][1]),
        )
        allowed = (
            bits in _AFFINE_BITS and group in _AFFINE_GROUPS
            if mode == "affine"
            else (bits, group) == _DEFAULT_SCHEME[mode]
        )
        if not allowed:
            raise refuse(
                ErrorCode.UNSUPPORTED,
                f"{self.checkpoint.path}: {module} is {mode} with {bits} bits and groups of {group}, "
                "which MLX does not have",
            )
        return Scheme(mode, bits, group)

    def _take(self, name: str, shape: list[int]) -> mx.array:
        found = self._tensors.pop(name, None)
        if found is None:
            raise self._bad(f"tensor {name} is missing; download the model again")
        if list(found.shape) != shape:
            raise self._bad(f"tensor {name} has shape {list(found.shape)}, config.json asks for {shape}")
        return found

    def _cast(self, tensor: mx.array) -> mx.array:
        return self._keep(tensor if tensor.dtype == self.dtype else tensor.astype(self.dtype))

    def _keep(self, tensor: mx.array) -> mx.array:
        self._taken.append(tensor)
        return tensor

    def _bad(self, fault: str) -> Refused:
        return refuse(ErrorCode.BAD_CHECKPOINT, f"{self.checkpoint.path}: {fault}")
