"""What an import writes: every tensor of a GGUF file under our names, dequantized or as MLX keeps it, and its loss."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.jobs import gguf_blocks
from worker.jobs.gguf import Gguf, GgufError, GgufTensor, Unsupported
from worker.jobs.gguf_blocks import GROUP, Bytes, Floats, Scheme, scheme_of
from worker.jobs.gguf_families import Family, row_order
from worker.jobs.safetensors_writer import Buffer, Planned

SLAB_BYTES = 32 << 20
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ALWAYS_WIDE = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
"""What chooses experts: small, and a rounding there picks another one."""


@dataclass(frozen=True)
class Target:
    """What to write: the float type, and whether quantized tensors stay so."""

    dtype: str
    quantized: bool


@dataclass
class Losses:
    """Squares of what is lost and of what there was, by tensor kind and type in the file: `down_proj Q6_K`."""

    lost: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)

    def add(self, kind: str, values: Floats, kept: Floats) -> None:
        """So many values that were, and what they are now."""
        self.lost[kind] = self.lost.get(kind, 0.0) + float(np.square(kept - values, dtype=np.float64).sum())
        self.whole[kind] = self.whole.get(kind, 0.0) + float(np.square(values, dtype=np.float64).sum())

    def relative(self) -> dict[str, float]:
        """Relative root mean square error of each kind."""
        return {
            kind: float(f"{math.sqrt(lost / (self.whole[kind] or 1.0)):.3g}")
            for kind, lost in sorted(self.lost.items())
        }

    def told(self) -> str:
        """One part of a sentence: by type, over all kinds; "" when nothing is lost."""
        lost: dict[str, float] = defaultdict(float)
        whole: dict[str, float] = defaultdict(float)
        for kind in self.lost:
            lost[kind.split()[-1]] += self.lost[kind]
            whole[kind.split()[-1]] += self.whole[kind]
        parts = [
            f"{name} {100 * math.sqrt(lost[name] / (whole[name] or 1.0)):.2g} %" for name in sorted(lost)
        ]
        return f"relative RMS error against the file: {', '.join(parts)}" if parts else ""


def plan_tensors(
    gguf: Gguf, data: Bytes, family: Family, config: dict[str, Any], target: Target, losses: Losses
) -> list[Planned]:
    """Everything to write, in the file's order; `losses` fills as it is written. Raises `GgufError`."""
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    last = f"blk.{config['num_hidden_layers'] - 1}."
    if not any(name.startswith(last) for name in gguf.tensors):
        raise GgufError(
            f"it says that it has {config['num_hidden_layers']} layers, and has no tensor {last}*"
        )
    plan: list[Planned] = []
    for tensor in gguf.tensors.values():
        name = family.hf_name(tensor.name, config["num_hidden_layers"])
        if not name:
            continue
        count = tensor.shape[0]
        turns = {".attn_q.": heads, ".attn_k.": kv_heads} if family.turned else {}
        if any(part in tensor.name and count != number * dim for part, number in turns.items()):
            raise GgufError(f"tensor {tensor.name} has {count} rows, which are not heads of {dim} values")
        order = row_order(tensor.name, count, heads, kv_heads) if turns else None
        shift = family.shift(tensor.name)
        plan += _planned(name, tensor, gguf_blocks.row_view(data, tensor), order, shift, target, losses)
    plan += _missing_biases(family, config, {tensor.name for tensor in plan}, target)
    return plan


def quantization_of(gguf: Gguf, family: Family, layers: int) -> dict[str, Any]:
    """MLX's quantization dict for tensors that are kept, with its exceptions."""
    found: dict[str, Scheme | None] = {}
    for tensor in gguf.tensors.values():
        name = family.hf_name(tensor.name, layers)
        if len(tensor.shape) > 1 and name.endswith(".weight"):
            found[name.removesuffix(".weight")] = scheme_of(tensor.type.name)
    usual = Counter(each for each in found.values() if each).most_common(1)[0][0]
    quantization: dict[str, Any] = usual.entry()
    for module, each in found.items():
        if each != usual:
            quantization[module] = each.entry() if each else False
    return quantization


def choose_target(gguf: Gguf, asked: str, *, on_cpu: bool) -> Target:
    """What to write for `dtype` as it was asked for; "auto" looks at the device."""
    if asked in DTYPES:
        return Target(asked, quantized=False)
    if asked == "auto" and on_cpu:
        return Target("float32", quantized=False)
    if any(scheme_of(tensor.type.name) for tensor in gguf.tensors.values() if len(tensor.shape) > 1):
        return Target("float16", quantized=True)  # what the file's scales are
    sizes: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
    largest = max(sizes, key=sizes.__getitem__)
    return Target({"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[largest], quantized=False)


def numbers(tensor: GgufTensor, rows: Bytes) -> Floats:
    """What these rows of it mean. Raises `GgufError` for values that are no numbers: no model can compute with them."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = gguf_blocks.dequantize(rows, tensor.type.name)
    if not np.isfinite(values).all():
        raise _no_numbers(tensor)
    return values


def _no_numbers(tensor: GgufTensor) -> GgufError:
    return GgufError(
        f"tensor {tensor.name} ({tensor.type.name}) has values that are not numbers (NaN or infinite), so the file is "
        "damaged; get it again"
    )


def _planned(
    name: str,
    tensor: GgufTensor,
    rows: Bytes,
    order: list[int] | None,
    shift: float,
    target: Target,
    losses: Losses,
) -> list[Planned]:
    kind, shape = tensor.type.name, tensor.shape
    scheme = scheme_of(kind) if target.quantized and len(shape) > 1 else None
    if scheme is not None:
        return _kept(name, tensor, rows, order, scheme, target, losses)
    dtype = "float32" if name.endswith(_ALWAYS_WIDE) else target.dtype

    def pieces() -> Iterator[Buffer]:
        if len(shape) == 1:
            values = numbers(tensor, rows)[0]
            values = values if order is None else values[np.array(order)]
            yield _bytes(_as(values - np.float32(shift) if shift else values, name, dtype))
            return
        for slab in _slabs(rows, order):
            yield _bytes(_as(numbers(tensor, slab), name, dtype))

    return [Planned(name, DTYPES[dtype], shape, pieces)]


def _kept(
    name: str,
    tensor: GgufTensor,
    rows: Bytes,
    order: list[int] | None,
    scheme: Scheme,
    target: Target,
    losses: Losses,
) -> list[Planned]:
    """A quantized tensor in MLX's parts. What it loses is measured where the codes are written."""
    kind, module = tensor.type.name, name.removesuffix(".weight")
    *front, width = tensor.shape
    told = f"{module.rpartition('.')[2]} {kind}"

    def codes() -> Iterator[Buffer]:
        for slab in _slabs(rows, order):
            with np.errstate(over="ignore", invalid="ignore"):
                made = gguf_blocks.parts(slab, kind)
            if not gguf_blocks.is_sound(made):
                raise _no_numbers(tensor)
            if not gguf_blocks.is_exact(kind, target.dtype):
                kept = gguf_blocks.meant(made, target.dtype, scheme.bits)
                losses.add(told, numbers(tensor, slab), kept)
            yield _bytes(made.weight)

    def scales() -> Iterator[Buffer]:
        for slab in _slabs(rows, order):
            made = gguf_blocks.parts(slab, kind)
            yield _bytes(made.scales if made.biases is None else _as(made.scales, name, target.dtype))

    def biases() -> Iterator[Buffer]:
        for slab in _slabs(rows, order):
            made = gguf_blocks.parts(slab, kind)
            assert made.biases is not None
            yield _bytes(_as(made.biases, name, target.dtype))

    groups = (*front, width // GROUP)
    is_affine = scheme.mode == "affine"
    planned = [
        Planned(name, "U32", (*front, width * scheme.bits // 32), codes),
        Planned(f"{module}.scales", DTYPES[target.dtype] if is_affine else "U8", groups, scales),
    ]
    return (
        [*planned, Planned(f"{module}.biases", DTYPES[target.dtype], groups, biases)]
        if is_affine
        else planned
    )


def _slabs(rows: Bytes, order: list[int] | None) -> Iterator[Bytes]:
    """The rows in the order wanted, some MB at a time."""
    step = max(1, SLAB_BYTES // (rows.shape[1] * 8))  # a slab grows up to eightfold in float32
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step] if order is None else rows[order[begin : begin + step]]


def _as(values: Floats, name: str, dtype: str) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = gguf_blocks.to_dtype(values, dtype)
    holds = (cast & 0x7FFF < 0x7F80) if dtype == "bfloat16" else np.isfinite(cast)
    if not holds.all():
        raise Unsupported(f"tensor {name} has values that {dtype} cannot hold; choose --dtype float32")
    return cast


def _bytes(values: NDArray[Any]) -> Buffer:
    return np.ascontiguousarray(values).data.cast("B")


def _missing_biases(family: Family, config: dict[str, Any], names: set[str], target: Target) -> list[Planned]:
    """transformers has biases on all four attention matrices or none; a GGUF may leave out the last one."""
    if not config.get("attention_bias") or family.model_type == "glm4_moe":
        return []
    hidden = config["hidden_size"]
    zeros = _bytes(_as(np.zeros(hidden, np.float32), "a bias", target.dtype))
    wanted = [f"model.layers.{i}.self_attn.o_proj.bias" for i in range(config["num_hidden_layers"])]
    dtype = DTYPES[target.dtype]
    return [Planned(name, dtype, (hidden,), lambda: iter([zeros])) for name in wanted if name not in names]
