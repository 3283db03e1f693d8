"""Rotation: the same logits, another stream."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from shared.errors import ErrorCode, Refused
from shared.lab import Quantize
from tests.oracles.checkpoints import case as case_of
from tests.oracles.checkpoints import names, reference, write_case
from tests.worker.models.running import logits_of
from tests.worker.quantize.lab import UNIFORM, logits, run_job, tensors_of
from worker.measure.streamed import unread_decoder
from worker.quantize.layout import open_source
from worker.quantize.rotate import FAMILIES, Rotation, rotate

CASES = [name for name in names() if case_of(name)[0]["model_type"] in FAMILIES]


@pytest.mark.parametrize("size", [1, 64, 96, 576])
def test_quantize_rotation_keeps_lengths_and_angles_and_is_the_same_for_a_seed(size: int) -> None:
    turn = Rotation(size, 42)
    whole = np.array(turn(mx.eye(size)))
    assert np.abs(whole @ whole.T - np.eye(size)).max() < 1e-5
    assert np.array_equal(whole, np.array(Rotation(size, 42)(mx.eye(size))))
    if size > 1:
        assert not np.array_equal(whole, np.array(Rotation(size, 43)(mx.eye(size))))
        assert np.abs(whole).max() < 0.9  # no channel stays by itself


@pytest.mark.parametrize("case", CASES)
def test_quantize_rotation_leaves_the_logits_as_they_are(case: str, tmp_path: Path) -> None:
    source = open_source(write_case(case, tmp_path / "model"))
    ids = reference(case)["input_ids"]
    rotate(source, 7)
    turned = logits_of(unread_decoder(source.as_checkpoint, "float32", source.tensors), ids, [1 << 30])
    assert np.abs(turned - logits(tmp_path / "model", case)).max() < 2e-4
    assert float(mx.abs(source.tensors["model.norm.weight"] - 1).max().item()) == 0


def test_a_rotated_model_is_quantized_and_loads_with_a_head_of_its_own(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    for seed in (1, 1, 2):
        out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
        spec = Quantize(
            model=str(model), bits=8, group_size=32, measure=False, rotate=True, rotation_seed=seed
        )
        run_job(spec, out)
    first, again, other = sorted(path for path in tmp_path.iterdir() if path.name.startswith("out"))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert "lm_head.weight" in tensors_of(first)
    assert np.abs(logits(first, "llama_tied") - logits(model, "llama_tied")).max() < 0.2
    assert "random Hadamard matrix of seed 1" in (first / "README.md").read_text()


@pytest.mark.parametrize("case", ["gemma3", "gemma4_e", "qwen3_5", "gpt_oss"])
def test_quantize_refuses_to_rotate_what_does_not_allow_it(case: str, tmp_path: Path) -> None:
    model = write_case(case, tmp_path / "model")
    with pytest.raises(Refused, match="cannot be rotated") as refused:
        run_job(Quantize(model=str(model), rotate=True, **UNIFORM), tmp_path / "out")
    assert refused.value.failure.code is ErrorCode.UNSUPPORTED
    assert refused.value.failure.param == "rotate"
