"""Perplexity and divergence of models: the numbers of mlx-lm, of themselves, of an adapter; and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from shared.errors import ErrorCode, Refused
from shared.jobs import JobEvent, JobStage
from shared.lab import Evaluate
from tests.adapters import ALL, random_pairs, write_mlx
from tests.oracles.checkpoints import case, write_case, write_model
from tests.worker.models.running import logits_of
from worker.jobs import evaluate
from worker.jobs.context import JobContext
from worker.lab.scoring import rows_of, score
from worker.models import load_model

WORDS = "the harbour keeper counted waves and wrote them down while lamps went out one by one "


def quiet(stage: str, done: int, total: int) -> None:
    """Nothing is told."""


def random_rows(count: int, length: int, vocabulary: int = 64, seed: int = 1) -> list[list[int]]:
    made = np.random.RandomState(seed)
    return [made.randint(1, vocabulary, length).tolist() for _ in range(count)]


def perplexity_of(logits: np.ndarray, targets: list[int]) -> tuple[float, float]:
    """By the formula, in double precision."""
    logits = logits.astype(np.float64)
    most = logits.max(-1, keepdims=True)
    total = most[..., 0] + np.log(np.exp(logits - most).sum(-1))
    losses = total - logits[np.arange(len(targets)), targets]
    value = math.exp(losses.mean())
    return value, value * losses.std(ddof=1) / math.sqrt(len(losses))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case("llama_tied", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def test_a_lab_perplexity_is_that_of_mlx_lm(model: Path, vocabulary: int) -> None:
    from mlx_lm.perplexity import eval_ppl
    from mlx_lm.utils import load_model as load_theirs

    rows = random_rows(5, 12, vocabulary)
    theirs, _ = load_theirs(model)
    value, error = eval_ppl(theirs, mx.array(rows), batch_size=2)
    found = score(model, rows, quiet).perplexity
    assert found.value == pytest.approx(value, rel=1e-4)
    assert found.error == pytest.approx(error, rel=1e-3)
    assert found.tokens == 5 * 11


@pytest.mark.parametrize("length", [2, 12, 300])
def test_a_lab_perplexity_is_that_of_the_formula(model: Path, vocabulary: int, length: int) -> None:
    rows = random_rows(3, length, vocabulary)
    loaded = load_model(model)
    logits, targets = [], []
    for row in rows:
        logits.append(logits_of(loaded.model, np.array(row), [1 << 30])[:-1])
        targets += row[1:]
    value, error = perplexity_of(np.concatenate(logits), targets)
    found = score(model, rows, quiet).perplexity
    assert found.value == pytest.approx(value, rel=1e-4)
    assert found.error == pytest.approx(error, rel=1e-3)


def test_a_lab_model_does_not_diverge_from_itself(model: Path, vocabulary: int) -> None:
    found = score(model, random_rows(4, 10, vocabulary), quiet, reference=str(model))
    assert found.divergence is not None
    assert found.reference is not None
    assert found.reference.value == found.perplexity.value
    assert abs(found.divergence.mean) < 1e-6
    assert abs(found.divergence.p95) < 1e-5
    assert (found.divergence.same_top, found.divergence.positions) == (1.0, 36)


def test_a_lab_model_that_was_quantized_diverges_by_its_bits(
    tmp_path: Path, model: Path, vocabulary: int
) -> None:
    rows, found = random_rows(6, 16, vocabulary), []
    for bits in (8, 4, 2):
        how = {"bits": bits, "group_size": 32, "mode": "affine"}
        other = write_case("llama_tied", tmp_path / str(bits), quantize=how)
        one = score(other, rows, quiet, reference=str(model)).divergence
        assert one is not None
        assert one.median <= one.p95
        found.append(one.mean)
    assert 0 < found[0] < found[1] < found[2]


def test_a_lab_adapter_is_measured_as_it_runs(tmp_path: Path, model: Path, vocabulary: int) -> None:
    adapter = write_mlx(tmp_path / "a", random_pairs(model, ALL, seed=1))
    rows = random_rows(4, 10, vocabulary)
    plain, with_it = score(model, rows, quiet), score(model, rows, quiet, adapter=str(adapter))
    assert plain.perplexity.value != with_it.perplexity.value
    beside = score(model, rows, quiet, adapter=str(adapter), reference=str(model))
    assert beside.perplexity == with_it.perplexity
    assert beside.reference == plain.perplexity
    assert beside.divergence is not None
    assert beside.divergence.mean > 0


def test_a_lab_text_is_cut_into_rows_that_do_not_overlap(tmp_path: Path, model: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 20)
    whole = [token for row in rows_of(model, str(text), 1000, 7, 0) for token in row]
    rows = rows_of(model, str(text), 1000, 16, 0)
    assert all(len(row) == 16 for row in rows)
    assert [token for row in rows for token in row] == whole[: len(rows) * 16]
    assert rows_of(model, str(text), 2, 16, 0) == rows[:2]
    [short] = rows_of(model, str(text), 2, 1 << 20, 0)
    assert len(short) >= len(whole)
    assert len(rows_of(model, "", 4, 16, 0)) == 4  # the text that comes along


def test_a_lab_data_set_is_taken_in_an_order_of_the_seed(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    lines = [json.dumps({"text": f"{number} {WORDS}"}) for number in range(12)]
    (folder / "train.jsonl").write_text("\n".join(lines))
    first, again, other = (rows_of(model, str(folder), 3, 16, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert rows_of(model, str(folder / "train.jsonl"), 3, 16, 1) == first


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (None, "none.txt", "No such file"),
        (b"\xff\xff", "a.txt", "is no UTF-8 text"),
        (b"", "a.txt", "there is no text in it"),
        (b'{"text": "a"}\nbroken\n', "a.jsonl", "line 2 is not JSON"),
    ],
)
def test_a_lab_text_that_cannot_be_read_is_named(
    tmp_path: Path, model: Path, content: bytes | None, name: str, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=said) as refused:
        rows_of(model, str(tmp_path / name), 3, 16, 0)
    assert refused.value.failure.param == "data"


def test_lab_models_of_two_vocabularies_are_not_compared(
    tmp_path: Path, model: Path, vocabulary: int
) -> None:
    config, seed = case("llama_tied")
    size = vocabulary + 16
    other = write_model({**config, "vocab_size": size}, seed, tmp_path / "other")
    with pytest.raises(Refused, match=f"has {size} words and the model {vocabulary}") as refused:
        score(model, random_rows(2, 8, min(size, vocabulary)), quiet, reference=str(other))
    assert refused.value.failure.param == "reference"


# ---------------------------------------------------------------- the job


def run(spec: Evaluate, events: list[JobEvent] | None = None, stop_at: str = "") -> Any:
    told = [] if events is None else events

    def should_stop() -> bool:
        return bool(stop_at) and any(isinstance(each, JobStage) and each.stage == stop_at for each in told)

    return evaluate.run(spec, JobContext(told.append, should_stop))


def test_a_lab_evaluation_gives_numbers_by_name(model: Path) -> None:
    events: list[JobEvent] = []
    spec = Evaluate(model=str(model), model_id="org/tiny", num_samples=4, sequence_length=16)
    done = run(spec, events)
    numbers = done.result["numbers"]
    assert set(numbers) == {"perplexity", "perplexity_error", "tokens", "peak_bytes"}
    assert numbers["tokens"] == 60
    assert done.summary == f"perplexity {numbers['perplexity']:.3f} ± {numbers['perplexity_error']:.3f}"
    assert "mlx" in done.result["versions"]
    stages = [event.stage for event in events if isinstance(event, JobStage)]
    assert stages[0] == "read"
    assert stages[-1] == "score"
    beside = run(msgspec.structs.replace(spec, reference=str(model)))
    assert beside.result["numbers"]["same_top"] == 1.0
    assert {"kl_mean", "kl_median", "kl_p95", "reference_perplexity"} <= beside.result["numbers"].keys()
    assert run(spec).result["numbers"]["perplexity"] == numbers["perplexity"]


@pytest.mark.parametrize("stage", ["load", "score"])
def test_a_lab_evaluation_can_be_stopped(model: Path, stage: str) -> None:
    with pytest.raises(Refused) as refused:
        run(Evaluate(model=str(model), num_samples=40, sequence_length=16), stop_at=stage)
    assert refused.value.failure.code is ErrorCode.SHUTTING_DOWN
