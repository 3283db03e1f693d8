"""How a sequence is cut or batched changes no token; without a tuned BLAS it changes no bit (CPU, float32).

OpenBLAS picks kernels by shape, so with it sums may differ in the last place; mlx's own reference BLAS, run
in a process of its own, shows that the graph itself is exact.
"""

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from shared.checkpoint import inspect, kv_bytes
from tests.oracles import checkpoints
from worker.cache.buffer import STEP
from worker.layers.batch import Batch, solo
from worker.models import DecoderModel, load_model

CASES = ["llama_tied", "rope_yarn", "mistral_window"]


def ways(model: DecoderModel, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Logits of `ids` computed in one pass, in two, stepwise, and as a row beside another sequence."""

    def run(rows: list[np.ndarray], cuts: list[int]) -> np.ndarray:
        caches = [model.make_caches(len(row)) for row in rows]
        parts, begin = [], 0
        for end in [*cuts, len(ids)]:
            tokens = mx.array(np.concatenate([row[begin:end] for row in rows]))
            hidden = model(Batch(tokens, [(each, end - begin) for each in caches]))
            parts.append(model.head(hidden)[-(end - begin) :])
            begin = end
        return np.array(mx.concatenate(parts))

    steps = list(range(1, len(ids)))
    return {
        "one pass": run([ids], []),
        "two": run([ids], [17]),
        "stepwise": run([ids], steps),
        "beside another": run([ids[::-1], ids], [17]),
        "beside another, stepwise": run([ids[::-1], ids], steps),
    }


def greatest_difference(name: str, folder: Path) -> float:
    """Between any two ways of computing the same logits."""
    model = load_model(checkpoints.write_case(name, folder)).model
    found = list(ways(model, checkpoints.reference(name)["input_ids"]).values())
    return max(float(np.abs(each - found[0]).max()) for each in found)


@pytest.mark.parametrize("name", CASES)
def test_every_way_gives_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = load_model(checkpoints.write_case(name, tmp_path)).model
    found = ways(model, checkpoints.reference(name)["input_ids"])
    first = found["one pass"]
    for way, logits in found.items():
        assert np.abs(logits - first).max() < 1e-5, way
        assert np.array_equal(logits.argmax(-1), first.argmax(-1)), way


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="bits are compared on CPU only")
def test_without_a_tuned_blas_every_way_gives_the_same_bits(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.worker.models.test_exactness import *\n"
        "for name in CASES: print(greatest_difference(name, Path(sys.argv[1]) / name))"
    )
    env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=root,
        env={**env, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == [0.0] * len(CASES)


@pytest.mark.parametrize("name", ["llama_tied", "llama_head_dim"])
def test_full_caches_hold_what_the_formula_says(name: str, tmp_path: Path) -> None:
    folder = checkpoints.write_case(name, tmp_path)
    model = load_model(folder).model
    caches = model.make_caches()
    model(solo(mx.ones(STEP, mx.int32), caches))
    held = sum(cache.nbytes for cache in caches)
    assert held == kv_bytes(inspect(folder), STEP, 4)
