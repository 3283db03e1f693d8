"""The trainable part: low-rank factors beside frozen projections (LoRA, Hu et al. 2021; DoRA, Liu et al. 2024).

Arrays are a flat dict, `{module}.lora_a` [in, r], `{module}.lora_b` [r, out] and, for DoRA, `{module}.m` [out], all
float32. Projections read them through `Linear.delta` from `Adapter.arrays`, which whoever differentiates replaces.
Weights that are quantized stay so (QLoRA, Dettmers et al. 2023).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from shared.errors import ErrorCode, refuse
from shared.lab import Finetune
from worker.layers.linear import DenseLinear, Linear, QuantizedLinear
from worker.models import LoadedModel
from worker.models.decoder import Decoder

Arrays = dict[str, mx.array]

TARGETS = (
    *("up_proj", "down_proj", "gate_proj", "o_proj", "v_proj", "k_proj", "q_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"),
    *("per_layer_input_gate", "per_layer_projection"),
)
"""Leaf names of projections of attention and MLP. In this order, the MLP before attention, a llama's factors are drawn
as mlx-lm draws them."""

ROWS = 4096
"""Rows of a weight that are multiplied out at once."""


@dataclass(frozen=True)
class Site:
    """One projection that is trained: what `r` it has, and what its product is multiplied with."""

    module: str
    layer: int
    linear: Linear
    rank: int
    scale: float

    @property
    def key(self) -> str:
        """The name within its layer, as mlx-lm's `keys` have it."""
        return self.module.split(".", 3)[3]


class Adapter:
    """The sites, and the arrays in use: `arrays` None = the frozen model alone."""

    def __init__(self, sites: Sequence[Site], *, is_dora: bool, dropout: float, seed: int) -> None:
        self.sites, self.is_dora, self.dropout = sites, is_dora, dropout
        self.arrays: Arrays | None = None
        self._seed = seed
        self._keys: list[mx.array] | None = None
        self._norms: dict[str, mx.array] = {}
        if is_dora:
            self._norms = {site.module: squared_norms(site.linear) for site in sites}
            mx.eval(self._norms)
        for number, site in enumerate(sites):
            site.linear.delta = self._delta(site, number)

    def names(self, layers: range) -> list[str]:
        """Of the arrays of these layers."""
        leaves = ("lora_a", "lora_b", "m") if self.is_dora else ("lora_a", "lora_b")
        return [f"{site.module}.{leaf}" for site in self.sites if site.layer in layers for leaf in leaves]

    def begin_step(self, step: int | None) -> None:
        """Draw the dropout of a step, the same whenever it is asked for; None = no dropout (evaluation)."""
        self._keys = None
        if self.dropout and step is not None:
            key = mx.random.key((self._seed << 32) ^ step)
            self._keys = list(mx.random.split(key, len(self.sites)))

    def initial(self) -> Arrays:
        """The arrays before the first step: A drawn, B zero, so that the model is what it was."""
        key, arrays = mx.random.key(self._seed), {}
        for site in self.sites:
            out, wide = site.linear.shape
            key, _ = mx.random.split(key)  # mlx-lm draws a whole projection first, and throws it away
            key, own = mx.random.split(key)
            bound = 1 / math.sqrt(wide)
            arrays[f"{site.module}.lora_a"] = mx.random.uniform(-bound, bound, (wide, site.rank), key=own)
            arrays[f"{site.module}.lora_b"] = mx.zeros((site.rank, out))
            if self.is_dora:
                arrays[f"{site.module}.m"] = mx.sqrt(self._norms[site.module])
        mx.eval(arrays)
        return arrays

    def remove(self) -> None:
        """Leave the model as it was."""
        for site in self.sites:
            site.linear.delta = None

    def _delta(self, site: Site, number: int) -> "_Delta":
        return _Delta(self, site, number)

    def _dropped(self, x: mx.array, number: int) -> mx.array:
        if self._keys is None:
            return x
        kept = 1 - self.dropout
        mask = mx.random.bernoulli(kept, x.shape, key=self._keys[number])
        return mx.where(mask, x * (1 / kept), mx.array(0, x.dtype))


class _Delta:
    """What a site adds: `x` [T, in], `y` [T, out] to another `y`."""

    def __init__(self, adapter: Adapter, site: Site, number: int) -> None:
        self.adapter, self.site, self.number = adapter, site, number

    def __call__(self, x: mx.array, y: mx.array) -> mx.array:
        adapter, site = self.adapter, self.site
        if adapter.arrays is None:
            return y
        a, b = adapter.arrays[f"{site.module}.lora_a"], adapter.arrays[f"{site.module}.lora_b"]
        product = (adapter._dropped(x, self.number) @ a) @ b
        added = (site.scale * product).astype(y.dtype)
        if not adapter.is_dora:
            return y + added
        bias = site.linear.bias if isinstance(site.linear, DenseLinear | QuantizedLinear) else None
        norms = row_norms(adapter._norms[site.module], site, a, b)
        factor = (adapter.arrays[f"{site.module}.m"] / mx.stop_gradient(norms)).astype(y.dtype)
        return (y + added) * factor if bias is None else (y - bias + added) * factor + bias


def row_norms(squared: mx.array, site: Site, a: mx.array, b: mx.array) -> mx.array:
    """Norms [out] of the rows of W + scale (A B)^T, without making that: |w|^2 + 2 s b·(W A) + s^2 |A b|^2."""
    crossed = (product(site.linear, a.T) * b).sum(axis=0)
    own = ((a.T @ a @ b) * b).sum(axis=0)
    return mx.sqrt(mx.maximum(squared + 2 * site.scale * crossed + site.scale**2 * own, 0))


def product(linear: Linear, x: mx.array) -> mx.array:
    """`x @ W.T` of the frozen weight alone, in float32."""
    if isinstance(linear, QuantizedLinear):
        how = linear.scheme
        return mx.quantized_matmul(
            x,
            linear.weight,
            *_float32(linear),
            transpose=True,
            group_size=how.group_size,
            bits=how.bits,
            mode=how.mode,
        )
    assert isinstance(linear, DenseLinear)
    return x @ linear.weight.astype(mx.float32).T


def squared_norms(linear: Linear) -> mx.array:
    """Of the rows of the weight, [out] float32; quantized ones are multiplied out a piece at a time."""
    pieces = []
    for begin in range(0, linear.shape[0], ROWS):
        rows = slice(begin, begin + ROWS)
        if isinstance(linear, QuantizedLinear):
            how, (scales, biases) = linear.scheme, _float32(linear)
            weight = mx.dequantize(
                linear.weight[rows],
                scales[rows],
                None if biases is None else biases[rows],
                group_size=how.group_size,
                bits=how.bits,
                mode=how.mode,
            )
        else:
            assert isinstance(linear, DenseLinear)
            weight = linear.weight[rows]
        pieces.append(mx.square(weight.astype(mx.float32)).sum(axis=1))
        mx.eval(pieces[-1])
    return mx.concatenate(pieces)


def _float32(linear: QuantizedLinear) -> tuple[mx.array, mx.array | None]:
    if linear.scheme.mode != "affine":  # scales of these are bytes
        return linear.scales, linear.biases
    biases = linear.biases
    return linear.scales.astype(mx.float32), None if biases is None else biases.astype(mx.float32)


def attach(loaded: LoadedModel, spec: Finetune) -> Adapter:
    """Put an adapter beside the projections that `spec` names. Raises `Refused` (invalid_request, unsupported)."""
    sites = choose_sites(loaded, spec)
    return Adapter(sites, is_dora=spec.kind == "dora", dropout=spec.lora_dropout, seed=spec.seed)


def choose_sites(loaded: LoadedModel, spec: Finetune) -> list[Site]:
    """In the order in which their factors are drawn."""
    layers = len(decoder_of(loaded).layers)
    depth = layers if spec.num_layers < 0 else spec.num_layers
    if depth > layers or depth == 0:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"num_layers is {spec.num_layers}, and the model has {layers} layers; choose 1 to {layers}, or -1 for all",
            param="num_layers",
        )
    inside = {name: linear for name, linear in loaded.linears.items() if name.startswith("model.layers.")}
    leaves = {name.rpartition(".")[2] for name in inside}
    unknown = sorted(set(spec.target_modules) - leaves)
    if unknown:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"target_modules: the model has no {unknown[0]!r}; there are {', '.join(sorted(leaves))}",
            param="target_modules",
        )
    wanted = set(spec.target_modules) or set(TARGETS)
    sites = [
        Site(name, layer, linear, *_size(linear, spec))
        for name, linear in inside.items()
        if name.rpartition(".")[2] in wanted and (layer := int(name.split(".")[2])) >= layers - depth
    ]
    if not sites:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"the last {depth} layers have none of {', '.join(sorted(wanted))}",
            param="target_modules",
        )
    return sorted(sites, key=_order)


def _order(site: Site) -> tuple[int, bool, int, str]:
    """By layer, the MLP first, then as `TARGETS` has them."""
    leaf = site.module.rpartition(".")[2]
    place = TARGETS.index(leaf) if leaf in TARGETS else len(TARGETS)
    return site.layer, ".mlp." not in site.module, place, site.module


def _size(linear: Linear, spec: Finetune) -> tuple[int, float]:
    """Rank and scale of a projection. "by_bits": 8 bits have the rank asked for, 4 bits twice as much."""
    rank = spec.rank
    bits = linear.scheme.bits if isinstance(linear, QuantizedLinear) else 16
    if spec.rank_scaling == "by_bits" and bits < 8:
        rank = round(rank * 8 / bits)
    rank = min(rank, *linear.shape)
    scale = spec.scale * spec.rank / math.sqrt(rank) if spec.rs_lora else spec.scale
    return rank, scale


def count_values(arrays: Mapping[str, mx.array]) -> int:
    """How many numbers are trained."""
    return sum(one.size for one in arrays.values())


def decoder_of(loaded: LoadedModel) -> Decoder:
    """Raises `Refused` (unsupported) for models whose graph is not ours."""
    if not isinstance(loaded.model, Decoder):
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{loaded.checkpoint.path}: models of provider {loaded.provider} are not trained here; "
            "mlx_lm.lora trains them",
            param="model",
        )
    return loaded.model
