"""Converts a GGUF file of a family that is ours to a model directory in the hub's layout.

Tensors go through in slabs of rows, so memory stays small whatever the size of the model. Quantized types are
dequantized exactly to float32 (rounded once to 16 bit), or kept as MLX's quantization: bit for bit where it has the
like, quantized anew where it has not; the job's result and the model's card say what that loses.
"""

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import ImportGguf, JobDone, JobStage
from shared.units import format_bytes
from shared.version import VERSION
from worker.jobs import gguf_blocks, gguf_tokenizer, safetensors_writer
from worker.jobs.context import JobContext, make_scratch, publish, require_space
from worker.jobs.gguf import Gguf, GgufError, Unsupported, parse
from worker.jobs.gguf_blocks import Bytes
from worker.jobs.gguf_config import ROPE_FREQS, ROPE_LONG, ROPE_SHORT, Facts
from worker.jobs.gguf_families import FAMILIES, Family, config_of
from worker.jobs.gguf_plan import (
    DTYPES,
    SLAB_BYTES,
    Losses,
    Target,
    choose_target,
    numbers,
    plan_tensors,
    quantization_of,
)
from worker.jobs.safetensors_writer import Planned

SPARE_BYTES = 64 << 20  # tokenizer, configs, and not to fill a disk to the last byte


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
    family = FAMILIES.get(str(architecture))
    if family is None:
        raise Unsupported(f"architecture {architecture!r} cannot be converted; {', '.join(FAMILIES)} can")
    target = choose_target(gguf, spec.dtype, on_cpu=spec.dtype == "auto" and _runs_on_cpu())
    config = config_of(family, Facts(gguf, _tables(gguf, data)))
    losses = Losses()
    plan = plan_tensors(gguf, data, family, config, target, losses)
    total = sum(tensor.num_bytes for tensor in plan)
    scratch = make_scratch(output)
    try:
        require_space(scratch, total + SPARE_BYTES)
        # first what may be refused, then the long work
        gguf_tokenizer.write(gguf.metadata, scratch, config["max_position_embeddings"])
        _write_json(scratch / "config.json", _finish_config(config, gguf, family, target))
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
                **({"relative_rms_error": lost} if (lost := losses.relative()) else {}),
            },
        )
        ctx.check()
        publish(scratch, output)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    ctx.emit(JobStage("convert", total, total))
    shape = "quantized, " if target.quantized else ""
    told = f"{len(gguf.tensors)} tensors, {shape}{target.dtype}, {format_bytes(total)}"
    return JobDone(str(output), "; ".join(filter(None, (told, losses.told()))))


def _runs_on_cpu() -> bool:
    import mlx.core as mx  # only here: a job that is told its dtype does without

    return bool(mx.default_device().type == mx.DeviceType.cpu)


def _tables(gguf: Gguf, data: Bytes) -> dict[str, list[float]]:
    """The tensors that say how queries and keys are turned, which become part of the config."""
    found: dict[str, list[float]] = {}
    for name in (ROPE_FREQS, ROPE_LONG, ROPE_SHORT):
        if tensor := gguf.tensors.get(name):
            rows = gguf_blocks.row_view(data, tensor)
            found[name] = numbers(tensor, rows)[0].tolist()
    return found


def _finish_config(config: dict[str, Any], gguf: Gguf, family: Family, target: Target) -> dict[str, Any]:
    """Adds dtype and, for a quantized target, MLX's quantization dict."""
    config = {**config, "dtype": target.dtype, "torch_dtype": target.dtype}
    if not target.quantized:
        return config
    quantization = quantization_of(gguf, family, config["num_hidden_layers"])
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
