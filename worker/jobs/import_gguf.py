"""Converts a llama-family GGUF file to a model directory in the hub's layout.

Tensors go through in slabs of rows, so memory stays small whatever the size of the model. The quantized types
are kept bit for bit as MLX affine quantization, or dequantized exactly to float32 (rounded once to 16 bit).
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import ImportGguf, JobDone, JobStage
from shared.units import format_bytes
from shared.version import VERSION
from worker.jobs import gguf_blocks, gguf_llama, gguf_tokenizer, safetensors_writer
from worker.jobs.context import JobContext, make_scratch, publish, require_space
from worker.jobs.gguf import Gguf, GgufError, GgufTensor, Unsupported, parse
from worker.jobs.gguf_blocks import BITS, Bytes
from worker.jobs.safetensors_writer import Buffer, Planned

SLAB_BYTES = 32 << 20
SPARE_BYTES = 64 << 20  # tokenizer, configs, and not to fill a disk to the last byte
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class Target:
    """What to write: the float type, and whether quantized tensors stay so."""

    dtype: str
    quantized: bool


def run(spec: ImportGguf, ctx: JobContext) -> JobDone:
    """Convert `spec.source` to `ctx.output`. Raises `Refused`, one line with the file and the fault."""
    source, output = Path(spec.source), ctx.output
    if output is None:
        raise refuse(ErrorCode.INVALID_REQUEST, "an import needs an output folder", param="output")
    if spec.dtype not in ("auto", "keep", *DTYPES):
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"dtype {spec.dtype!r} is not known; choose auto, keep, {', '.join(DTYPES)}",
            param="dtype",
        )
    try:
        if source.stat().st_size == 0:
            raise GgufError("the file is empty")
        data = np.memmap(source, np.uint8, mode="r")
        gguf = parse(data.data)
        return _convert(spec, ctx, gguf, data, output)
    except GgufError as error:
        code = ErrorCode.UNSUPPORTED if isinstance(error, Unsupported) else ErrorCode.BAD_CHECKPOINT
        raise refuse(code, f"{source}: {error}") from None
    except OSError as error:
        raise _os_refusal(error, source, output) from None


def _os_refusal(error: OSError, source: Path, output: Path) -> Refused:
    """A file that cannot be read, a disk that is full, or whatever else the system said, in one line."""
    if error.filename is not None and Path(error.filename) == source:
        return refuse(ErrorCode.BAD_CHECKPOINT, f"{source}: {error.strerror}")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return refuse(
        ErrorCode.CANNOT_FIT if full else ErrorCode.INTERNAL,
        f"{error.filename or output}: {error.strerror}; {source.name} was not imported",
    )


def _convert(spec: ImportGguf, ctx: JobContext, gguf: Gguf, data: Bytes, output: Path) -> JobDone:
    source = Path(spec.source)
    architecture = gguf.metadata.get("general.architecture")
    if architecture != gguf_llama.ARCHITECTURE:
        raise Unsupported(f"architecture {architecture!r} cannot be converted; 'llama' can")
    target = choose_target(gguf, spec.dtype)
    config = gguf_llama.config_of(gguf, _rope_factors(gguf, data))
    plan = plan_tensors(gguf, data, config, target)
    total = sum(tensor.num_bytes for tensor in plan)
    scratch = make_scratch(output)
    try:
        require_space(scratch, total + SPARE_BYTES)
        # first what may be refused, then the long work
        gguf_tokenizer.write(gguf.metadata, scratch, config["max_position_embeddings"])
        _write_json(scratch / "config.json", _finish_config(config, gguf, target))
        _write_json(scratch / "generation_config.json", _generation_config(config, gguf.metadata))
        digest = _sha256(data, ctx)
        done = 0

        def on_tensor(tensor: Planned) -> None:
            nonlocal done
            ctx.check()
            ctx.emit(JobStage("convert", done, total, tensor.name))
            done += tensor.num_bytes

        kind = "mlx" if target.quantized else "pt"
        safetensors_writer.write(scratch, plan, on_tensor=on_tensor, metadata={"format": kind})
        _write_json(
            scratch / "mlxd.json",
            {
                "name": spec.name,
                "aliases": spec.aliases,
                "origin": spec.origin or source.name,
                "dtype": target.dtype,
                "source_sha256": digest,
                "tool": f"mlxd {VERSION}",
            },
        )
        ctx.check()
        publish(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ctx.emit(JobStage("convert", total, total))
    shape = "quantized, " if target.quantized else ""
    return JobDone(str(output), f"{len(gguf.tensors)} tensors, {shape}{target.dtype}, {format_bytes(total)}")


def choose_target(gguf: Gguf, asked: str) -> Target:
    """What to write for `dtype` as it was asked for; "auto" looks at the device."""
    if asked in DTYPES:
        return Target(asked, quantized=False)
    if asked == "auto" and _runs_on_cpu():
        return Target("float32", quantized=False)
    kinds = {tensor.type.name for tensor in gguf.tensors.values() if len(tensor.shape) == 2}
    if kinds & BITS.keys():
        return Target("float16", quantized=True)  # what the file's scales are
    sizes: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
    largest = max(sizes, key=sizes.__getitem__)
    return Target({"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[largest], quantized=False)


def _runs_on_cpu() -> bool:
    import mlx.core as mx  # only here: a job that is told its dtype does without

    return bool(mx.default_device().type == mx.DeviceType.cpu)


def plan_tensors(gguf: Gguf, data: Bytes, config: dict[str, Any], target: Target) -> list[Planned]:
    """Everything to write, in the file's order. Raises `GgufError` for a tensor that does not belong."""
    heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    plan: list[Planned] = []
    for tensor in gguf.tensors.values():
        if tensor.name == gguf_llama.ROPE_FREQS:
            continue
        name = gguf_llama.hf_name(tensor.name)
        count = tensor.shape[0]
        order = gguf_llama.row_order(tensor.name, count, heads, kv_heads)
        if order is not None and count != (heads if ".attn_q." in tensor.name else kv_heads) * dim:
            raise GgufError(f"tensor {tensor.name} has {count} rows, which are not heads of {dim} values")
        plan += _planned(name, tensor, gguf_blocks.row_view(data, tensor), order, target)
    plan += _missing_biases(config, {tensor.name for tensor in plan}, target)
    return plan


def _planned(
    name: str, tensor: GgufTensor, rows: Bytes, order: list[int] | None, target: Target
) -> list[Planned]:
    kind, shape = tensor.type.name, tensor.shape
    float_dtype = DTYPES[target.dtype]
    if len(shape) == 1:
        permuted = None if order is None else np.array(order)

        def vector() -> Iterator[Buffer]:
            values = gguf_blocks.dequantize(rows, kind)[0]
            yield _bytes(_as_target(values if permuted is None else values[permuted], name, target))

        return [Planned(name, float_dtype, shape, vector)]
    if not (target.quantized and kind in BITS):
        return [Planned(name, float_dtype, shape, lambda: _dense(rows, kind, order, name, target))]
    module, groups = name.removesuffix(".weight"), shape[-1] // gguf_blocks.GROUP

    def codes() -> Iterator[Buffer]:
        for slab in _slabs(rows, order):
            yield _bytes(gguf_blocks.packed(slab, kind))

    def scales() -> Iterator[Buffer]:
        for slab in _slabs(rows, order):
            yield _bytes(_as_target(gguf_blocks.scales_of(slab, kind), name, target))

    def biases() -> Iterator[Buffer]:
        for slab in _slabs(rows, order):
            yield _bytes(_as_target(gguf_blocks.biases_of(slab, kind), name, target))

    return [
        Planned(name, "U32", (shape[0], shape[1] * BITS[kind] // 32), codes),
        Planned(f"{module}.scales", float_dtype, (shape[0], groups), scales),
        Planned(f"{module}.biases", float_dtype, (shape[0], groups), biases),
    ]


def _dense(rows: Bytes, kind: str, order: list[int] | None, name: str, target: Target) -> Iterator[Buffer]:
    for slab in _slabs(rows, order):
        yield _bytes(_as_target(gguf_blocks.dequantize(slab, kind), name, target))


def _slabs(rows: Bytes, order: list[int] | None) -> Iterator[Bytes]:
    """The rows in the order wanted, some MB at a time."""
    step = max(1, SLAB_BYTES // (rows.shape[1] * 8))  # a slab grows up to eightfold in float32
    for begin in range(0, len(rows), step):
        yield rows[begin : begin + step] if order is None else rows[order[begin : begin + step]]


def _as_target(values: NDArray[np.float32], name: str, target: Target) -> NDArray[Any]:
    with np.errstate(over="ignore"):
        cast = gguf_blocks.to_dtype(values, target.dtype)
    if target.dtype == "float16" and not np.isfinite(cast).all() and np.isfinite(values).all():
        raise Unsupported(f"tensor {name} has values that float16 cannot hold; choose --dtype float32")
    return cast


def _bytes(values: NDArray[Any]) -> Buffer:
    return np.ascontiguousarray(values).data.cast("B")


def _missing_biases(config: dict[str, Any], names: set[str], target: Target) -> list[Planned]:
    """transformers has biases on all four attention matrices or none; a GGUF may leave out the last one."""
    if not config["attention_bias"]:
        return []
    hidden = config["hidden_size"]
    zeros = _bytes(_as_target(np.zeros(hidden, np.float32), "a bias", target))
    wanted = [f"model.layers.{i}.self_attn.o_proj.bias" for i in range(config["num_hidden_layers"])]
    dtype = DTYPES[target.dtype]
    return [Planned(name, dtype, (hidden,), lambda: iter([zeros])) for name in wanted if name not in names]


def _rope_factors(gguf: Gguf, data: Bytes) -> Sequence[float] | None:
    tensor = gguf.tensors.get(gguf_llama.ROPE_FREQS)
    if tensor is None:
        return None
    values: list[float] = gguf_blocks.dequantize(gguf_blocks.row_view(data, tensor), tensor.type.name)[
        0
    ].tolist()
    return values


def _finish_config(config: dict[str, Any], gguf: Gguf, target: Target) -> dict[str, Any]:
    """Adds dtype and, for a quantized target, MLX's quantization dict with its exceptions."""
    config = {**config, "dtype": target.dtype, "torch_dtype": target.dtype}
    if not target.quantized:
        return config
    bits = {
        gguf_llama.hf_name(tensor.name).removesuffix(".weight"): BITS.get(tensor.type.name)
        for tensor in gguf.tensors.values()
        if len(tensor.shape) == 2
    }
    counted = [each for each in bits.values() if each]
    usual = max(set(counted), key=counted.count)
    quantization: dict[str, Any] = {"group_size": gguf_blocks.GROUP, "bits": usual, "mode": "affine"}
    for module, each in bits.items():
        if each is None:
            quantization[module] = False
        elif each != usual:
            quantization[module] = {"group_size": gguf_blocks.GROUP, "bits": each, "mode": "affine"}
    return {**config, "quantization": quantization, "quantization_config": quantization}


def _generation_config(config: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    ids = gguf_tokenizer.eos_ids(metadata)
    found = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
        "pad_token_id": config["pad_token_id"],
    }
    return {key: value for key, value in found.items() if value is not None}


def _sha256(data: Bytes, ctx: JobContext) -> str:
    digest = hashlib.sha256()
    for begin in range(0, len(data), SLAB_BYTES):
        ctx.check()
        ctx.emit(JobStage("hash", begin, len(data)))
        digest.update(data[begin : begin + SLAB_BYTES].data)
    return digest.hexdigest()


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
