"""A GGUF file whose numbers are none is refused by the tensor's name, whatever its type and what it is to become."""

from pathlib import Path

import numpy as np
import pytest

from shared.control import LaunchJob
from shared.errors import ErrorCode, Refused
from shared.jobs import ImportGguf
from tests.worker.jobs.gguf_files import Raw, case_tensors, floats, write
from worker import jobs
from worker.jobs import gguf_blocks, gguf_kquants

NAN, INF = b"\x00\x7e", b"\x00\xfc"  # of float16
# Where a block has its scale, and a second number of its own; of which length it is.
BLOCKS = {
    "Q4_0": ([0], 18, 32),
    "Q4_1": ([0, 2], 20, 32),
    "Q5_0": ([0], 22, 32),
    "Q5_1": ([0, 2], 24, 32),
    "Q8_0": ([0], 34, 32),
    "Q2_K": ([80, 82], 84, 256),
    "Q3_K": ([108], 110, 256),
    "Q4_K": ([0, 2], 144, 256),
    "Q5_K": ([0, 2], 176, 256),
    "Q6_K": ([208], 210, 256),
}


def convert(folder: Path, name: str, raw: Raw, dtype: str) -> None:
    """An import of a whole model whose tensor of this name is that one."""
    metadata, tensors, _ = case_tensors("llama_tied")
    assert name in tensors
    source = write(folder / "m.gguf", metadata, {**tensors, name: raw})
    spec = ImportGguf(source=str(source), name="tiny", dtype=dtype)
    jobs.run(LaunchJob(job_id="1", spec=spec, output=str(folder / "out")), lambda event: None, lambda: False)


def shape_of(name: str) -> tuple[int, ...]:
    return case_tensors("llama_tied")[1][name].shape


CASES = [
    (kind, at, number) for kind, (places, _, _) in BLOCKS.items() for at in places for number in (NAN, INF)
]


@pytest.mark.parametrize("dtype", ["keep", "float32"])
@pytest.mark.parametrize(("kind", "at", "number"), CASES)
def test_a_scale_that_is_no_number_is_refused(tmp_path, kind, at, number, dtype):
    """In one block only, the last of the tensor."""
    name, (_, size, values) = "blk.1.ffn_down.weight", BLOCKS[kind]
    rows, _ = shape_of(name)
    data = bytearray(b"\x11" * size * rows * max(1, 256 // values))
    width = 256
    for begin in range(0, len(data), size):
        for place in BLOCKS[kind][0]:
            data[begin + place : begin + place + 2] = b"\x00\x2c"  # 0.0625
    data[len(data) - size + at : len(data) - size + at + 2] = number
    metadata, tensors, _ = case_tensors("llama_tied")
    wide = {"llama.feed_forward_length": width}
    others = {
        f"blk.{layer}.{part}.weight": floats("F32", np.zeros((width, shape_of(name)[0])))
        for layer in range(metadata["llama.block_count"])
        for part in ("ffn_up", "ffn_gate")
    }
    downs = {
        f"blk.{layer}.ffn_down.weight": floats("F32", np.zeros((rows, width)))
        for layer in range(metadata["llama.block_count"])
    }
    broken = Raw(kind, (rows, width), bytes(data), np.zeros(0, np.float32))
    source = write(tmp_path / "m.gguf", metadata | wide, {**tensors, **others, **downs, name: broken})
    spec = ImportGguf(source=str(source), name="tiny", dtype=dtype)
    launch = LaunchJob(job_id="1", spec=spec, output=str(tmp_path / "out"))
    with pytest.raises(Refused, match=f"tensor {name} .* not numbers") as refused:
        jobs.run(launch, lambda event: None, lambda: False)
    assert refused.value.failure.code is ErrorCode.BAD_CHECKPOINT
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["blk.0.attn_norm.weight", "blk.0.attn_q.weight", "token_embd.weight"])
def test_a_weight_that_is_no_number_is_refused(tmp_path, name, number, kind):
    values = np.ones(shape_of(name), np.float32)
    values[..., -1] = number
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(Refused, match=f"tensor {name} .* not numbers"):
            convert(tmp_path, name, floats(kind, values), dtype)


def test_what_the_type_asked_for_cannot_hold_is_refused_too(tmp_path):
    name = "blk.0.attn_norm.weight"
    values = np.full(shape_of(name), 3.4e38, np.float32)
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(Refused, match=f"{dtype} cannot hold; choose --dtype float32"):
            convert(tmp_path, name, floats("F32", values), dtype)
    convert(tmp_path, name, floats("F32", values), "float32")


def test_a_power_of_two_that_is_none_is_no_number():
    rows = np.zeros((2, 34), np.uint8)
    rows[:, [0, 17]] = 127
    assert gguf_blocks.is_sound(gguf_blocks.parts(rows, "MXFP4"))
    rows[1, 17] = 255
    assert not gguf_blocks.is_sound(gguf_blocks.parts(rows, "MXFP4"))


def test_the_table_of_this_file_knows_all_blocks():
    sizes = gguf_blocks._BLOCK_BYTES | gguf_kquants.BLOCK_BYTES
    assert {kind: size for kind, (_, size, _) in BLOCKS.items()} | {"MXFP4": 17} == sizes
