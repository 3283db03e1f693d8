"""Fine-tuning beside mlx-lm: `python -m tests.bench.train [MODEL_DIR] [--quick]`.

The same LoRA of the starter on the same chats with the same seed, here and by `mlx_lm.lora`, each in processes of its
own with the same BLAS, by turns:

    curve    the greatest difference between the losses of one step
    speed    steps a second, medians over steps after the first rounds through the data (mlx-lm compiles in those)
    memory   mlx's peak with gradient checkpointing on, and told beside it: with the head in chunks too

Each line says held or MISSED; the exit code is 1 when one is missed. Compare only numbers of one run.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from parent.config import load_settings
from parent.workers.blas import worker_env
from shared.lab import Finetune
from tests.bench.serve import ROOT, machine, starter
from tests.bench.verdict import Line, at_least, below, table
from tests.train.lab import chats, trainer_of, write_data

CURVE, SPEED, MEMORY = 1e-3, 0.95, 1.0
ROWS, LONGEST = 16, 70
Found = dict[str, Any]
"""`losses`, `seconds` of each step, `peak` bytes."""


def main() -> int:
    """Run everything, print the table and one JSON line. 1 = a bar was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a model directory (default: the starter)")
    parser.add_argument("--quick", action="store_true", help="one short round, for a look")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of a child: who, and its settings
    options = parser.parse_args()
    if options.way:
        who, settings = json.loads(options.way)
        found = {"ours": _ours, "mlx_lm": _theirs}[who](Finetune(**settings))
        print(json.dumps(found))
        return 0
    data = ROOT / ".data"
    environment, blas = worker_env(load_settings({"data_dir": str(data)}, {}, home=ROOT).settings)
    model = (options.model or starter(data)).resolve()
    print(f"{machine()}; {blas}; model {model.name}{'; quick' if options.quick else ''}\n", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="mlxd-bench-") as folder:
        lines = _measure(model, Path(folder), environment, quick=options.quick)
    print(table(lines))
    print(json.dumps([line._asdict() | {"verdict": line.verdict} for line in lines]))
    return int(any(line.is_held is False for line in lines))


def _measure(model: Path, folder: Path, environment: dict[str, str], *, quick: bool) -> list[Line]:
    rows = 8 if quick else ROWS
    data = write_data(folder / "data", chats(rows, longest=LONGEST))
    spec: dict[str, Any] = {
        "model": str(model),
        "data": str(data),
        "iters": 3 * rows // 4,
        "batch_size": 4,
        "learning_rate": 1e-4,
        "scale": 10.0,
        "seed": random.Random(0).randrange(1000),
        "weight_decay": 0.0,
        "grad_clip_norm": 0.0,
        "like_mlx_lm": True,
        "steps_per_eval": 0,
    }

    def run(who: str, **more: Any) -> Found:
        began = time.monotonic()
        way = json.dumps([who, {**spec, **more}])
        command = [sys.executable, "-m", "tests.bench.train", "--way", way]
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{who}: {done.stderr.strip()[-600:]}")
        print(f"{who} {more or ''}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found

    seconds: dict[str, list[float]] = {"mlx_lm": [], "ours": []}
    losses: dict[str, list[float]] = {}
    for _ in range(1 if quick else 2):
        for who, times in seconds.items():
            found = run(who)
            losses[who] = found["losses"]
            times += found["seconds"][2 * rows // 4 :]
    apart = max(abs(one - other) for one, other in zip(losses["ours"], losses["mlx_lm"], strict=True))
    ours, theirs = (1 / statistics.median(seconds[who]) for who in ("ours", "mlx_lm"))
    short = {"iters": 4, "grad_checkpoint": True}
    peaks = {who: run(who, **short)["peak"] for who in ("mlx_lm", "ours")}
    chunked = run("ours", **short, head_chunk=128)["peak"]
    mib = {name: peak / 2**20 for name, peak in (*peaks.items(), ("chunked", chunked))}
    return [
        below(
            "curve",
            f"loss over {len(losses['ours'])} steps: greatest difference to mlx_lm.lora",
            apart,
            CURVE,
        ),
        at_least(
            "speed",
            "steps a second: mlxd / mlx_lm.lora",
            ours / theirs,
            SPEED,
            notes=f"{ours:.3g} / {theirs:.3g}",
        ),
        below(
            "memory",
            "peak with checkpointing: mlxd / mlx_lm.lora",
            mib["ours"] / mib["mlx_lm"],
            MEMORY,
            notes=f"{mib['ours']:.0f} / {mib['mlx_lm']:.0f} MiB",
        ),
        Line(
            "memory",
            "the same with head_chunk 128",
            f"{mib['chunked'] / mib['mlx_lm']:.3g} ({mib['chunked']:.0f} MiB)",
        ),
    ]


def _ours(spec: Finetune) -> Found:
    import mlx.core as mx

    trainer = trainer_of(spec)
    found: Found = {"losses": [], "seconds": []}
    for _ in range(spec.iters):
        began = time.perf_counter()
        found["losses"].append(trainer.take_step().loss)
        found["seconds"].append(time.perf_counter() - began)
    return {**found, "peak": mx.get_peak_memory()}


def _theirs(spec: Finetune) -> Found:
    import mlx.core as mx
    from mlx_lm import lora

    found: Found = {"losses": [], "seconds": []}

    class Report:
        def on_train_loss_report(self, info: dict[str, Any]) -> None:
            found["losses"].append(info["train_loss"])
            found["seconds"].append(1 / info["iterations_per_second"])

        def on_val_loss_report(self, info: dict[str, Any]) -> None:
            raise AssertionError("there is nothing to evaluate on")

    lora.get_reporting_callbacks = lambda *args, **more: Report()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            **lora.CONFIG_DEFAULTS,
            "model": spec.model,
            "data": spec.data,
            "train": True,
            "num_layers": -1,
            "batch_size": spec.batch_size,
            "iters": spec.iters,
            "learning_rate": spec.learning_rate,
            "steps_per_report": 1,
            "max_seq_length": spec.max_seq_length,
            "seed": spec.seed,
            "grad_checkpoint": spec.grad_checkpoint,
            "adapter_path": folder,
            "lora_parameters": {"rank": spec.rank, "dropout": 0.0, "scale": spec.scale},
        }
        lora.run(types.SimpleNamespace(**options))
    return {**found, "peak": mx.get_peak_memory()}


if __name__ == "__main__":
    sys.exit(main())
