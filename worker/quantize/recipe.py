"""What is quantized and how: the matrices of a model, the bits of each, and what they take on disk.

The uniform recipe is that of mlx-lm 0.32: every matrix whose inputs divide into groups, embeddings and head included;
routers that families name are held in 8 bits, those that decide in float32 not at all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import ErrorCode, refuse
from shared.lab import Quantize
from worker.layers.linear import Scheme
from worker.quantize.layout import Source, is_stack, layer_of
from worker.weights import AFFINE_GROUPS, DEFAULT_SCHEME

ROUTERS: Mapping[str, tuple[str, ...]] = {
    "qwen3_moe": (".mlp.gate",),
    **dict.fromkeys(
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), (".mlp.gate", ".shared_expert_gate")
    ),
    "gpt_oss": (".mlp.router",),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"), (".router.proj",)),
}
"""Modules that get `ROUTER_BITS`, by the ends of their names."""

NEVER: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("deepseek_v3", "glm4_moe", "glm4_moe_lite"), (".mlp.gate",)
)
"""Modules that are never quantized."""

ROUTER_BITS, ROUTER_GROUPS = 8, (64, 32)


@dataclass(frozen=True)
class Matrix:
    """One module with a weight. `scale_bytes`: of one of its scales, were it affine."""

    module: str
    params: int
    inputs: int
    scale_bytes: int

    @property
    def layer(self) -> int | None:
        return layer_of(f"{self.module}.")

    @property
    def is_attention(self) -> bool:
        return "_attn." in self.module

    def bytes_as(self, scheme: Scheme) -> int:
        """What its weight and scales take on disk."""
        groups = self.params // scheme.group_size
        each = 2 * self.scale_bytes if scheme.mode == "affine" else 1
        return self.params * scheme.bits // 8 + groups * each


@dataclass(frozen=True)
class Recipe:
    """`general`: what config.json says at the top. `schemes`: of every module that is quantized, `fixed` ones included:
    those that get the same bits whatever is asked for. `open`: the matrices that could have others.
    """

    general: Scheme
    schemes: Mapping[str, Scheme]
    fixed: Mapping[str, Scheme]
    open: tuple[Matrix, ...]

    def written(self, kept: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """The quantization entry of config.json."""
        found: dict[str, Any] = _entry(self.general)
        for module, scheme in self.schemes.items():
            if scheme != self.general:
                found[module] = _entry(scheme)
        return {**found, **kept}


def general_scheme(spec: Quantize) -> Scheme:
    """Mode, bits and group that are asked for. Raises `Refused` (invalid_request) for what MLX does not have."""
    bits, group = DEFAULT_SCHEME[spec.mode]
    asked = (spec.bits or bits, spec.group_size or group)
    if spec.mode == "affine":
        if asked[1] not in AFFINE_GROUPS:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"group_size {asked[1]} is for nvfp4; mode affine has {', '.join(map(str, AFFINE_GROUPS))}",
                param="group_size",
            )
        return Scheme("affine", *asked)
    if asked != (bits, group):
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"mode {spec.mode} has {bits} bits in groups of {group}, and {asked[0]} bits in groups of {asked[1]} are "
            "asked for; leave both out, or choose mode affine",
            param="bits" if asked[0] != bits else "group_size",
        )
    if spec.target_bpw is not None:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"target_bpw mixes bits of mode affine, and mode {spec.mode} is asked for; leave one of them out",
            param="target_bpw",
        )
    return Scheme(spec.mode, bits, group)


def matrices(source: Source) -> list[Matrix]:
    """Everything with a weight that could be quantized, in order."""
    found = []
    for name, tensor in source.tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "weight" or module in source.kept or module.endswith(NEVER.get(source.family, ())):
            continue
        if tensor.ndim == 2 or (tensor.ndim == 3 and is_stack(module)):
            found.append(Matrix(module, tensor.size, tensor.shape[-1], tensor.dtype.size))
    return found


def uniform(source: Source, general: Scheme) -> Recipe:
    """Every matrix alike. Raises `Refused` (unsupported) where no matrix divides into groups."""
    every = matrices(source)
    fitting = [matrix for matrix in every if matrix.inputs % general.group_size == 0]
    if not fitting:
        widths = sorted({matrix.inputs for matrix in every})
        shown = ", ".join(map(str, widths[:8]))
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{source.checkpoint.path}: no matrix divides into groups of {general.group_size} "
            f"({f'inputs: {shown}' if widths else 'all of them are quantized for good'}); choose a smaller group_size",
            param="group_size",
        )
    fixed: dict[str, Scheme] = {}
    for matrix in fitting:
        if matrix.module.endswith(ROUTERS.get(source.family, ())):
            group = next((size for size in ROUTER_GROUPS if matrix.inputs % size == 0), None)
            if group is not None:
                fixed[matrix.module] = Scheme("affine", ROUTER_BITS, group)
    free = tuple(matrix for matrix in fitting if matrix.module not in fixed)
    schemes = {matrix.module: fixed.get(matrix.module, general) for matrix in fitting}
    return Recipe(general, schemes, fixed, free)


def mixed(recipe: Recipe, chosen: Mapping[str, int]) -> Recipe:
    """The same with `chosen` bits of the open matrices; what most have is the general scheme."""
    group = recipe.general.group_size
    schemes = {
        module: recipe.fixed.get(module) or Scheme("affine", chosen[module], group)
        for module in recipe.schemes
    }
    counts: dict[Scheme, int] = {}
    for module in chosen:
        counts[schemes[module]] = counts.get(schemes[module], 0) + 1
    general = max(counts, key=lambda scheme: (counts[scheme], -scheme.bits))
    return Recipe(general, schemes, recipe.fixed, recipe.open)


def _entry(scheme: Scheme) -> dict[str, Any]:
    return {"group_size": scheme.group_size, "bits": scheme.bits, "mode": scheme.mode}


@dataclass(frozen=True)
class Size:
    """Of a whole model: bytes of its tensors, and values in them."""

    num_bytes: int
    params: int

    @property
    def bits_per_weight(self) -> float:
        return self.num_bytes * 8 / self.params


def size_of(source: Source, schemes: Mapping[str, Scheme]) -> Size:
    """As mlx-lm counts: everything in the files by the number of values that it stands for."""
    num_bytes, params = 0, 0
    every = {matrix.module: matrix for matrix in matrices(source)}
    for name, tensor in source.tensors.items():
        module, _, leaf = name.rpartition(".")
        if module in source.kept and leaf in ("weight", "scales"):
            num_bytes += tensor.nbytes
            params += tensor.size * 8 if leaf == "weight" else 0
        elif leaf == "weight" and module in schemes:
            num_bytes += every[module].bytes_as(schemes[module])
            params += tensor.size
        else:
            num_bytes += tensor.nbytes
            params += tensor.size
    return Size(num_bytes, params)
