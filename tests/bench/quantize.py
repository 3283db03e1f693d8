"""Quantizing beside mlx-lm: `python -m tests.bench.quantize [MODEL_DIR] [--quick]`.

The starter, each way in a process of its own with the same BLAS:

    bytes    tensors of the uniform recipe that are those of `mlx_lm.convert -q`, to the byte; seconds of both told
    memory   mlx's peak of the uniform recipe by (the largest shard of the source + its largest layer or matrix outside)
    mixed    KL to the source on held-out text: uniform by a mix of the same size
    rotated  KL of the uniform recipe at 3 bits, as it is by rotated first: told

Each line says held or MISSED; the exit code is 1 when one is missed. Compare only numbers of one run.
"""

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from parent.config import load_settings
from parent.workers.blas import worker_env
from shared.checkpoint import inspect, tensors_of
from shared.lab import Quantize
from tests.bench.serve import ROOT, machine, starter
from tests.bench.verdict import Line, all_of, at_least, below, table

BETTER, MEMORY = 1.0, 1.0
CANDIDATES = [2, 3, 4, 5, 6, 8]
TEXT, QUICK_TEXT = (16, 256), (6, 128)
"""Pieces of the held-out text, and their tokens."""
Found = dict[str, Any]


def main() -> int:
    """Run everything, print the table and one JSON line. 1 = a bar was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, help="a model directory (default: the starter)")
    parser.add_argument(
        "--quick", action="store_true", help="few calibration tokens and candidates, for a look"
    )
    parser.add_argument(
        "--keep", type=Path, help="a folder for the mix's job, which goes on where it was broken off"
    )
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of a child: who, where to, and its settings
    options = parser.parse_args()
    if options.way:
        who, *where, settings = json.loads(options.way)
        print(json.dumps({"ours": _ours, "mlx_lm": _theirs}[who](*where, Quantize(**settings))))
        return 0
    data = ROOT / ".data"
    environment, blas = worker_env(load_settings({"data_dir": str(data)}, {}, home=ROOT).settings)
    model = (options.model or starter(data)).resolve()
    print(f"{machine()}; {blas}; model {model.name}{'; quick' if options.quick else ''}\n", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="mlxd-bench-") as folder:
        lines = _measure(model, Path(folder), options.keep, environment, quick=options.quick)
    print(table(lines))
    print(json.dumps([line._asdict() | {"verdict": line.verdict} for line in lines]))
    return int(any(line.is_held is False for line in lines))


def _measure(
    model: Path, folder: Path, keep: Path | None, environment: dict[str, str], *, quick: bool
) -> list[Line]:
    held_out = QUICK_TEXT if quick else TEXT

    def run(who: str, output: str, *, work: Path | None = None, **spec: Any) -> Found:
        began = time.monotonic()
        where = [str(folder / output), str(work or folder / f"{output}-work"), held_out]
        way = json.dumps([who, *where, {"model": str(model), **spec}])
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.quantize", "--way", way],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        print(f"{who} {spec}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found

    plain = {"bits": 4, "group_size": 64}
    theirs = run("mlx_lm", "theirs", **plain)
    bare = run("ours", "bare", **plain, measure=False)
    same, total = _same(folder / "bare", folder / "theirs")
    uniform = run("ours", "uniform", **plain)
    more = {"num_calibration": 1, "calibration_tokens": 64} if quick else {}
    mixed = run(
        "ours",
        "mixed",
        work=keep,
        group_size=64,
        target_bpw=uniform["bpw"],
        candidate_bits=[3, 4, 6] if quick else CANDIDATES,
        **more,
    )
    three = {
        turned: run("ours", f"3-{turned}", bits=3, group_size=64, rotate=turned) for turned in (False, True)
    }
    sizes = f"{mixed['bpw']:.3f} and {uniform['bpw']:.3f} bits a weight"
    return [
        all_of(
            "bytes",
            "tensors as mlx_lm.convert -q makes them, 4 bits",
            same,
            total,
            notes=f"{bare['seconds']:.1f} s, there {theirs['seconds']:.1f} s",
        ),
        below(
            "memory",
            "peak of the uniform recipe / (a shard + a layer)",
            bare["peak"] / _allowed(model),
            MEMORY,
            notes=f"{bare['peak'] >> 20} MiB, mlx_lm.convert {theirs['peak'] >> 20} MiB",
        ),
        at_least(
            "mixed",
            "KL to the source on held-out text: uniform / mixed",
            uniform["kl"] / mixed["kl"],
            BETTER,
            notes=f"{uniform['kl']:.4f} / {mixed['kl']:.4f}, {sizes}",
        ),
        Line(
            "mixed", "perplexity: uniform, mixed", f"{uniform['perplexity']:.2f}, {mixed['perplexity']:.2f}"
        ),
        Line("mixed", "seconds, calibration included", f"{mixed['seconds']:.0f}"),
        Line(
            "rotated",
            "KL at 3 bits: as it is / rotated",
            f"{three[False]['kl'] / three[True]['kl']:.3g} ({three[False]['kl']:.4f} / {three[True]['kl']:.4f})",
        ),
    ]


def _same(one: Path, other: Path) -> tuple[int, int]:
    """Tensors that are alike to the byte, and all there are in either."""
    from tests.worker.quantize.lab import raw
    from tests.worker.quantize.lab import tensors_of as loaded

    mine, theirs = loaded(one), loaded(other)
    names = mine.keys() | theirs.keys()
    same = sum(name in mine and name in theirs and raw(mine[name]) == raw(theirs[name]) for name in names)
    return same, len(names)


def _allowed(model: Path) -> int:
    """Bytes of the largest shard and of the largest layer, or matrix outside of layers."""
    from worker.quantize.layout import layer_of

    checkpoint = inspect(model)
    parts: dict[str, int] = {}
    for name, tensor in tensors_of(checkpoint).items():
        layer = layer_of(name)
        part = name if layer is None else str(layer)
        parts[part] = parts.get(part, 0) + tensor.num_bytes
    return max(shard.num_bytes for shard in checkpoint.shards) + max(parts.values())


def _ours(output: str, work: str, held_out: tuple[int, int], spec: Quantize) -> Found:
    import mlx.core as mx

    from shared.jobs import JobEvent, JobStage
    from worker.jobs.context import JobContext
    from worker.jobs.quantize import run
    from worker.measure.compare import measure
    from worker.measure.texts import pieces

    def told(event: JobEvent) -> None:
        if isinstance(event, JobStage) and event.stage == "sensitivity" and event.done % 10 == 0:
            print(f"  {event.done} of {event.total}", file=sys.stderr, flush=True)

    began = time.monotonic()
    quiet = Quantize(**{name: getattr(spec, name) for name in spec.__struct_fields__} | {"measure": False})
    run(quiet, JobContext(told, lambda: False, Path(output), Path(work)))
    found: Found = {"seconds": time.monotonic() - began, "peak": mx.get_peak_memory()}
    facts = inspect(Path(output))
    params = sum(math.prod(tensor.shape) for tensor in tensors_of(inspect(Path(spec.model))).values())
    found["bpw"] = facts.weights_bytes * 8 / params
    if spec.measure:
        rows = pieces(Path(spec.model), "", "held_out", *held_out, param="calibration")
        measured = measure(Path(output), rows, Path(spec.model), lambda done, total: None)
        assert measured.divergence is not None
        found |= {"kl": measured.divergence.mean, "perplexity": measured.perplexity.value}
    return found


def _theirs(output: str, work: str, held_out: tuple[int, int], spec: Quantize) -> Found:
    import mlx.core as mx
    from mlx_lm.convert import convert

    began = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):
        convert(spec.model, output, quantize=True, q_bits=spec.bits, q_group_size=spec.group_size)
    return {"seconds": time.monotonic() - began, "peak": mx.get_peak_memory()}


if __name__ == "__main__":
    sys.exit(main())
