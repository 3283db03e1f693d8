"""Beside mlx-lm: the loss curve of `mlx_lm.lora` on the same data, and adapters that mlx-lm loads."""

import contextlib
import io
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import lora
from mlx_lm.utils import load, load_adapters

from shared.lab import Finetune
from tests.train.lab import AFFINE, chats, model_of, run_job, trainer_of, write_data
from worker.layers.batch import solo
from worker.models import load_model
from worker.train.adapter import attach
from worker.train.files import warm_start

ALIKE = {"weight_decay": 0.0, "grad_clip_norm": 0.0, "like_mlx_lm": True}


def theirs(spec: Finetune, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """The losses that `mlx_lm.lora` reports, of training and of evaluations."""
    found: dict[str, list[float]] = {"train": [], "val": []}

    class Report:
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            found["train"].append(info["train_loss"])

        def on_val_loss_report(self, info: dict[str, Any]) -> None:
            found["val"].append(info["val_loss"])

    options = {
        **lora.CONFIG_DEFAULTS,
        "model": spec.model,
        "data": spec.data,
        "train": True,
        "fine_tune_type": spec.kind,
        "num_layers": spec.num_layers,
        "batch_size": spec.batch_size,
        "iters": spec.iters,
        "val_batches": -1,
        "learning_rate": spec.learning_rate,
        "steps_per_report": spec.steps_per_report,
        "steps_per_eval": spec.steps_per_eval,
        "max_seq_length": spec.max_seq_length,
        "seed": spec.seed,
        "grad_checkpoint": spec.grad_checkpoint,
        "grad_accumulation_steps": spec.grad_accumulation_steps,
        "mask_prompt": spec.sft_scope == "response",
        "adapter_path": str(folder),
        "lora_parameters": {"rank": spec.rank, "dropout": 0.0, "scale": spec.scale},
    }
    monkeypatch.setattr(lora, "get_reporting_callbacks", lambda *args, **more: Report())
    mx.disable_compile()  # compiling takes longer than all the steps
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            lora.run(types.SimpleNamespace(**options))
    finally:
        mx.enable_compile()
    return found


def ours(spec: Finetune) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"train": [], "val": []}
    trainer = trainer_of(spec)
    losses: list[float] = []
    for step in range(1, spec.iters + 1):
        if trainer.can_evaluate and (step in (1, spec.iters) or step % spec.steps_per_eval == 0):
            found["val"].append(trainer.evaluate(lambda: None).loss)
        losses.append(trainer.take_step().loss)
        if step % spec.steps_per_report == 0 or step == spec.iters:
            found["train"].append(sum(losses) / len(losses))
            losses = []
    return found


CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "response": {"sft_scope": "response"},
    "dora": {"kind": "dora"},
    "qlora": {"quantize": AFFINE},
    "dora of quantized weights": {"kind": "dora", "quantize": AFFINE},
    "the last layer": {"num_layers": 1},
    "accumulated": {"grad_accumulation_steps": 2},
    "by layer": {"grad_checkpoint": True},
    "in segments": {"segment_size": 2},
    "head in chunks": {"head_chunk": 50},
    "cut": {"max_seq_length": 50},
}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_curve_is_that_of_mlx_lm(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(CASES[case])
    model = model_of("llama_tied", tmp_path, quantize=options.pop("quantize", None))
    data = write_data(tmp_path / "data", chats(7), chats(3, seed=9))
    spec = Finetune(
        model=str(model),
        data=str(data),
        iters=6,
        batch_size=3,
        learning_rate=1e-3,
        scale=10.0,
        seed=7,
        steps_per_report=1,
        steps_per_eval=3,
        **{"max_seq_length": 256, **ALIKE, **options},
    )
    wanted, found = theirs(spec, tmp_path / "out", monkeypatch), ours(spec)
    assert len(found["train"]) == 6
    assert len(found["val"]) == 3
    assert found["train"][-1] < found["train"][0] - 0.05
    for kind, losses in wanted.items():
        assert found[kind] == pytest.approx(losses, abs=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "dora"},
        {"num_layers": 2, "target_modules": ["q_proj", "up_proj"]},
        {"rs_lora": True, "rank": 4},
        {
            "rank_scaling": "by_bits",
            "rs_lora": True,
            "quantize": {**AFFINE, "model.layers.1.mlp.up_proj": False},
        },
    ],
    ids=lambda options: " ".join(map(str, options)) or "lora",
)
def test_mlx_lm_loads_what_was_trained(options: dict[str, Any], tmp_path: Path) -> None:
    quantize = options.pop("quantize", None)
    model = model_of("llama_head_dim", tmp_path, quantize=quantize)
    data = write_data(tmp_path / "data", chats(4))
    spec = Finetune(
        model=str(model), data=str(data), model_id="tiny", iters=4, learning_rate=5e-3, scale=4.0, **options
    )
    done, _ = run_job(spec, tmp_path / "adapters" / "a")
    ids = list(range(20, 60))
    loaded = load_model(model)
    plain = np.array(loaded.model.head(loaded.model(solo(mx.array(ids), loaded.model.make_caches()))))
    adapter = attach(loaded, spec)
    adapter.arrays = warm_start(Path(done.output), adapter, adapter.initial())
    own = np.array(loaded.model.head(loaded.model(solo(mx.array(ids), loaded.model.make_caches()))))
    other, *_ = load(str(model))
    load_adapters(other, done.output)
    other.eval()
    logits = np.array(other(mx.array([ids]))[0])
    assert np.abs(own - logits).max() < 1e-4
    assert np.abs(own - plain).max() > 1e-2
