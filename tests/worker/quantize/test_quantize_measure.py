"""Perplexity and divergence: the numbers beside numpy's, a layer at a time, and the texts they are taken on."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.checkpoint import inspect
from shared.errors import Refused
from shared.lab import Quantize
from tests.oracles.checkpoints import write_case
from tests.worker.models.running import logits_of, one_case_a_family
from tests.worker.quantize.lab import UNIFORM, run_job
from worker.measure.compare import measure
from worker.measure.scores import divergence, log_probabilities, perplexity, summary, surprise
from worker.measure.streamed import final_states, passes, plain_decoder, unread_decoder
from worker.measure.texts import pieces
from worker.models import load_model

ROWS = [[10, 20, 30, 40, 50], [60, 61], [70, 80, 90, 100, 110, 120, 130, 140, 150]]


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True))


@given(seed=st.integers(0, 1000), spread=st.floats(0.1, 20))
def test_quantize_scores_are_those_of_the_formulas(seed: int, spread: float) -> None:
    random = np.random.RandomState(seed)
    a, b = (spread * random.standard_normal((2, 5, 17))).astype(np.float32)
    targets = random.randint(0, 17, 5)
    p, q = softmax(a.astype(np.float64)), softmax(b.astype(np.float64))
    mine, other, moved = (log_probabilities(mx.array(one)) for one in (a, b, a + 3))
    np.testing.assert_allclose(np.array(mine), np.log(p), rtol=1e-3, atol=1e-4)
    apart = np.array(divergence(mine, other))
    np.testing.assert_allclose(apart, (p * (np.log(p) - np.log(q))).sum(-1), rtol=1e-3, atol=1e-4)
    found = np.array(surprise(mx.array(a), mx.array(targets)))
    np.testing.assert_allclose(found, -np.log(p[np.arange(5), targets]), rtol=1e-3, atol=1e-4)
    assert np.abs(np.array(divergence(mine, moved))).max() < 1e-4


def test_quantize_summaries_of_what_was_measured() -> None:
    assert perplexity([0.0, 0.0]).value == 1
    found = perplexity([1.0, 2.0, 3.0])
    assert found.value == pytest.approx(np.exp(2))
    assert found.error == pytest.approx(np.exp(2) / np.sqrt(3))
    apart = summary([0.0, 0.0, 0.0, 1.0], 3)
    assert (apart.mean, apart.median, apart.same_top, apart.positions) == (0.25, 0, 0.75, 4)


PACKED = [{"bits": 4, "group_size": 32}, {"bits": 8, "group_size": 32, "mode": "mxfp8"}]


@pytest.mark.parametrize(
    ("case", "quantize"),
    [*((case, None) for case in one_case_a_family()), *(("llama_tied", how) for how in PACKED)],
)
def test_quantize_measures_layer_by_layer_what_the_whole_model_computes(
    case: str, quantize: dict[str, Any] | None, tmp_path: Path
) -> None:
    model = write_case(case, tmp_path / "model", quantize=quantize)
    told: list[tuple[int, int]] = []
    decoder = plain_decoder(inspect(model))
    hidden = mx.concatenate(list(final_states(decoder, ROWS, lambda *at: told.append(at))))
    found = np.array(decoder.head(hidden))
    loaded = load_model(model).model
    wanted = np.concatenate([logits_of(loaded, np.array(row), [1 << 30]) for row in ROWS])
    assert np.abs(found - wanted).max() < 1e-4
    assert told == [(done, told[-1][1]) for done in range(told[-1][1] + 1)]


def test_quantize_measures_a_model_beside_itself_and_beside_a_coarse_one(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    same = measure(model, ROWS, model, lambda done, total: None)
    assert same.divergence is not None
    assert same.divergence.mean == pytest.approx(0, abs=1e-6)
    assert same.divergence.same_top == 1
    assert same.perplexity == same.reference
    assert same.perplexity.tokens == sum(len(row) - 1 for row in ROWS)
    assert measure(model, ROWS, None, lambda done, total: None).divergence is None
    apart = []
    for bits in (2, 4, 8):
        run_job(Quantize(model=str(model), **{**UNIFORM, "bits": bits}), tmp_path / str(bits))
        found = measure(tmp_path / str(bits), ROWS, model, lambda done, total: None)
        assert found.divergence is not None
        assert found.reference == same.reference
        apart.append(found.divergence.mean)
    assert apart[0] > 3 * apart[1] > 3 * 3 * apart[2] > 0


def test_quantize_measures_many_rows_in_several_passes_alike(tmp_path: Path) -> None:
    model = write_case("qwen3", tmp_path / "model")
    rows = [[(7 * place + step) % 250 for step in range(700)] for place in range(5)]
    decoder = unread_decoder(inspect(model))
    assert [len(batch.rows) for batch in passes(decoder, rows)] == [2, 2, 1]
    whole = measure(model, rows, None, lambda done, total: None)
    alone = [measure(model, [row], None, lambda done, total: None).perplexity for row in rows]
    mean = np.mean([np.log(one.value) for one in alone])
    assert np.log(whole.perplexity.value) == pytest.approx(mean, abs=1e-5)


def test_quantize_texts_come_along_and_have_nothing_in_common(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    own = pieces(model, "", "calibration", 1000, 128, param="calibration")
    held = pieces(model, "", "held_out", 1000, 128, param="calibration")
    for found in (own, held):
        assert len(found) > 30
        assert {len(row) for row in found[:-1]} == {128}
    assert not {tuple(row[:16]) for row in own} & {tuple(row[:16]) for row in held}
    few = pieces(model, "", "calibration", 4, 128, param="calibration")
    assert [own.index(row) for row in few] == [place * len(own) // 4 for place in range(4)]


def test_quantize_texts_of_files(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    text = tmp_path / "some.txt"
    text.write_text("harbour " * 100)
    rows = tmp_path / "some.jsonl"
    rows.write_text("".join(json.dumps({"text": "harbour " * 10}) + "\n" for _ in range(10)))
    for file in (text, rows):
        found = pieces(model, str(file), "calibration", 3, 50, param="calibration")
        assert [len(row) for row in found] == [50] * 3
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    chats.write_text(json.dumps({"messages": messages}) + "\n")
    assert pieces(model, str(chats), "calibration", 3, 50, param="calibration")


FAULTS = {
    "empty.txt": (b"", "there is no text in it"),
    "blank.txt": (b" \n", "there is no text in it"),
    "letter.txt": (b"\xe4\xf6", "is no UTF-8 text"),
    "rows.jsonl": (b'{"text": "a"}\n{"tex', "line 2 is not JSON"),
    "none.jsonl": (b"\n", "there are no rows"),
}


@pytest.mark.parametrize("name", [*FAULTS, "missing.txt", "missing.jsonl"])
def test_quantize_names_what_is_wrong_with_a_text(name: str, tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    content, message = FAULTS.get(name, (None, "No such file"))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(Refused, match=message) as refused:
        pieces(model, str(tmp_path / name), "calibration", 4, 64, param="calibration")
    assert refused.value.failure.param == "calibration"
    assert name in str(refused.value)
