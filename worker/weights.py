"""The weights of a checkpoint on their way into a graph: mapped, checked by name and shape, cast, evaluated.

A family's module takes what it needs by name (`linear`, `embedding`, `vector`); what is missing or has the
wrong shape is refused there, what nobody took is refused by `finish`. Nothing is read from disk before
`materialise`, which evaluates in groups and reports bytes.
"""

from collections.abc import Callable, Container, Mapping, Sequence
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
from worker.layers.stacked import DenseStacked, QuantizedStacked

Progress = Callable[[int, int], None]

GROUP_BYTES = 64 << 20
"""How much is evaluated between two progress reports."""

DEFAULT_SCHEME = {"affine": (4, 64), "mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)


def materialise(arrays: Sequence[mx.array], on_progress: Progress | None) -> int:
    """Evaluate `arrays`, a group at a time; gives their bytes. `on_progress(done, total)` in bytes."""
    total, done, pending = sum(one.nbytes for one in arrays), 0, 0
    group: list[mx.array] = []
    for one in arrays:
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
    return total


def unread_tensors(checkpoint: Checkpoint) -> dict[str, mx.array]:
    """Everything in the files by name; each is read when it is first evaluated. Raises `Refused` (bad_checkpoint)."""
    found: dict[str, mx.array] = {}
    for shard in checkpoint.shards:
        path = Path(checkpoint.path) / shard.file
        try:
            loaded = mx.load(str(path), format="safetensors")
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise refuse(ErrorCode.BAD_CHECKPOINT, f"{path}: cannot be read ({reason})") from None
        assert isinstance(loaded, dict)
        found.update(loaded)
    return found


def written_scheme(quantization: Mapping[str, Any], module: str) -> dict[str, Any]:
    """What config.json says of the quantization of `module`: its own entry, and the general one for what that lacks.

    An entry with sizes and without a mode is affine, as mlx-lm reads it, whatever the general mode is.
    """
    own = quantization.get(module)
    if not isinstance(own, dict):
        return dict(quantization)
    sized = {"mode": "affine"} if own.keys() & {"bits", "group_size"} else {}
    return {**quantization, **sized, **own}


def multiply_out(
    checkpoint: Checkpoint,
    tensors: dict[str, mx.array],
    kept: Container[str] = (),
    dtype: mx.Dtype | None = None,
) -> bool:
    """Replace quantized weights in `tensors` by their values, but those of modules `kept`; -> whether there were any.

    `dtype`: of the values, None = that of the scales, or what config.json names where these are no numbers.
    """
    scheme: dict[str, Any] = checkpoint.config.get("quantization") or {}
    plain = {"float32": mx.float32, "float16": mx.float16}.get(
        str(checkpoint.config.get("dtype")), mx.bfloat16
    )
    modules = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    modules = [module for module in modules if module not in kept]
    for module in modules:
        scales, biases = tensors.pop(f"{module}.scales"), tensors.pop(f"{module}.biases", None)
        given = written_scheme(scheme, module)
        how = {key: given[key] for key in ("bits", "group_size", "mode") if key in given}
        if biases is not None:
            scales, biases = (one if dtype is None else one.astype(dtype) for one in (scales, biases))
        own = scales.dtype if mx.issubdtype(scales.dtype, mx.floating) else plain
        name = f"{module}.weight"
        tensors[name] = mx.dequantize(tensors[name], scales, biases, dtype=dtype or own, **how)
    return bool(modules)


class Weights:
    """Tensors of a checkpoint by name, each to be taken once. `dtype`: what floating point tensors become.

    `tensors`: those to take instead of what is in the files. `linears`: the projections that were taken, by their
    modules. `parts`: of modules that were split, the names and rows of their parts.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: mx.Dtype, tensors: Mapping[str, mx.array] | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.linears: dict[str, Linear] = {}
        self.parts: dict[str, Mapping[str, int]] = {}
        self._tensors: dict[str, mx.array] = dict(tensors or {})
        self._taken: list[mx.array] = []
        self._quantization: dict[str, Any] = dict(checkpoint.config.get("quantization") or {})
        if tensors is None:
            self._tensors = unread_tensors(checkpoint)

    def rename(self, change: Callable[[str], str | None]) -> None:
        """Give every tensor a new name; None drops it. For a family's checkpoint quirks.

        What config.json says of a module's quantization goes with it.
        """
        self._tensors = {new: one for name, one in self._tensors.items() if (new := change(name)) is not None}
        for module in [key for key, how in self._quantization.items() if isinstance(how, (dict, bool))]:
            how, new = self._quantization.pop(module), change(f"{module}.weight")
            if new is not None:
                self._quantization[new.removesuffix(".weight")] = how

    def name_bare(self) -> bool:
        """Put `model.` before the names of a model that was saved without its head, as models for vectors are.

        -> whether it was.
        """
        is_bare = "embed_tokens.weight" in self._tensors
        if is_bare:
            self.rename(lambda name: name if name.startswith("lm_head.") else f"model.{name}")
        return is_bare

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def pop(self, name: str) -> mx.array:
        """A tensor as the file has it, to be put back in another form."""
        if name not in self._tensors:
            raise self.bad(f"tensor {name} is missing; download the model again")
        return self._tensors.pop(name)

    def put(self, name: str, tensor: mx.array, *, quantized_as: str = "") -> None:
        """A tensor made of others. `quantized_as`: the module whose quantization in config.json holds for it."""
        self._tensors[name] = tensor
        if quantized_as in self._quantization:
            self._quantization[name.rpartition(".")[0]] = self._quantization[quantized_as]

    def split(self, module: str, parts: Mapping[str, int]) -> None:
        """Take the fused projection `module` apart into modules of so many rows each, in their order."""
        self.parts[module] = parts
        for leaf in ("weight", "scales", "biases", "bias"):
            name = f"{module}.{leaf}"
            if name not in self._tensors:
                continue
            whole, begin = self._tensors.pop(name), 0
            if whole.shape[0] != sum(parts.values()):
                raise self.bad(
                    f"tensor {name} has {whole.shape[0]} rows, config.json asks for {sum(parts.values())}"
                )
            for part, rows in parts.items():
                self.put(f"{part}.{leaf}", whole[begin : begin + rows], quantized_as=module)
                begin += rows

    def vector(
        self, name: str, size: int, *, dtype: mx.Dtype | None = None, plus: float = 0.0, times: float = 1.0
    ) -> mx.array:
        """A norm's weight or a bias, `[size]`, times `times`, and `plus` added, in float32.

        `dtype`: other than that of the model.
        """
        found = self._take(name, [size])
        if plus or times != 1:
            found = found.astype(mx.float32) * times + plus
        return self._cast(found, dtype)

    def linear(
        self, module: str, in_dim: int, out_dim: int, *, bias: bool = False, dtype: mx.Dtype | None = None
    ) -> Linear:
        """The projection `module` with weight `[out_dim, in_dim]`, quantized if the checkpoint says so."""
        parts = self._matrix(module, [out_dim, in_dim], dtype)
        offset = self.vector(f"{module}.bias", out_dim, dtype=dtype) if bias else None
        made = DenseLinear(parts, offset) if isinstance(parts, mx.array) else QuantizedLinear(*parts, offset)
        self.linears[module] = made
        return made

    def stacked(
        self, module: str, count: int, in_dim: int, out_dim: int, *, bias: bool = False
    ) -> DenseStacked | QuantizedStacked:
        """`count` projections in one weight `[count, out_dim, in_dim]`, with biases `[count, out_dim]`."""
        parts = self._matrix(module, [count, out_dim, in_dim])
        offset = self._cast(self._take(f"{module}.bias", [count, out_dim])) if bias else None
        if isinstance(parts, mx.array):
            return DenseStacked(parts, offset)
        return QuantizedStacked(*parts, offset)

    def embedding(self, module: str, count: int, dim: int) -> Embedding:
        """The table `module` with weight `[count, dim]`."""
        parts = self._matrix(module, [count, dim])
        if isinstance(parts, mx.array):
            return DenseEmbedding(parts)
        return QuantizedEmbedding(*parts, self.dtype)

    def finish(self) -> None:
        """Refuse tensors that nothing of the graph asked for: the graph would be another model's."""
        if self._tensors:
            name = min(self._tensors)
            more = f" and {len(self._tensors) - 1} more" if len(self._tensors) > 1 else ""
            raise self.bad(f"tensor {name}{more} is not part of a {self.checkpoint.model_type} model")

    def materialise(self, on_progress: Progress | None) -> int:
        """Read and cast everything taken; gives its bytes. `on_progress(done, total)` in bytes."""
        taken, self._taken = self._taken, []
        return materialise(taken, on_progress)

    # ------------------------------------------------------------ inside

    def _matrix(
        self, module: str, shape: list[int], dtype: mx.Dtype | None = None
    ) -> mx.array | tuple[mx.array, mx.array, mx.array | None, Scheme]:
        """`shape`: of the weight, were it not quantized; the inputs are its last dimension."""
        scheme = self._scheme(module)
        if scheme is None:
            return self._cast(self._take(f"{module}.weight", shape), dtype)
        rows, in_dim = shape[:-1], shape[-1]
        if in_dim % scheme.group_size:
            raise self.bad(f"{module}: {in_dim} inputs do not divide into groups of {scheme.group_size}")
        weight = self._take(f"{module}.weight", [*rows, in_dim * scheme.bits // 32])
        if weight.dtype != mx.uint32:
            raise self.bad(f"tensor {module}.weight is {weight.dtype}, but quantized weights are uint32")
        groups = [*rows, in_dim // scheme.group_size]
        scales = self._take(f"{module}.scales", groups)
        if scheme.mode != "affine":
            return self._keep(weight), self._keep(scales), None, scheme
        biases = self._take(f"{module}.biases", groups)
        return self._keep(weight), self._cast(scales, dtype), self._cast(biases, dtype), scheme

    def _scheme(self, module: str) -> Scheme | None:
        """How `module` is quantized, None if it is not: it must have scales and not be switched off."""
        has_scales = f"{module}.scales" in self._tensors
        override = self._quantization.get(module)
        if override is False or not has_scales:
            if has_scales:
                raise self.bad(f"{module} has scales, but config.json says it is not quantized")
            return None
        if not self._quantization:
            raise self.bad(f"{module} has scales, but config.json has no quantization entry")
        given = written_scheme(self._quantization, module)
        mode = given.get("mode", "affine")
        if mode not in DEFAULT_SCHEME:
            known = ", ".join(DEFAULT_SCHEME)
            raise refuse(
                ErrorCode.UNSUPPORTED,
                f"{self.checkpoint.path}: {module} has quantization mode {mode!r}; known are {known}",
            )
        bits, group = (
            given.get("bits", DEFAULT_SCHEME[mode][0]),
            given.get("group_size", DEFAULT_SCHEME[mode][1]),
        )
        allowed = (
            bits in AFFINE_BITS and group in AFFINE_GROUPS
            if mode == "affine"
            else (bits, group) == DEFAULT_SCHEME[mode]
        )
        if not allowed:
            raise refuse(
                ErrorCode.UNSUPPORTED,
                f"{self.checkpoint.path}: {module} is {mode} with {bits} bits and groups of {group}, "
                "which MLX does not have",
            )
        return Scheme(mode, bits, group)

    def _take(self, name: str, shape: list[int]) -> mx.array:
        found = self.pop(name)
        if list(found.shape) != shape:
            raise self.bad(f"tensor {name} has shape {list(found.shape)}, config.json asks for {shape}")
        return found

    def _cast(self, tensor: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
        dtype = dtype or self.dtype
        return self._keep(tensor if tensor.dtype == dtype else tensor.astype(dtype))

    def _keep(self, tensor: mx.array) -> mx.array:
        self._taken.append(tensor)
        return tensor

    def bad(self, fault: str) -> Refused:
        """The refusal of a checkpoint with this fault."""
        return refuse(ErrorCode.BAD_CHECKPOINT, f"{self.checkpoint.path}: {fault}")
