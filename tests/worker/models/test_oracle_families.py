"""Every family against Hugging Face transformers: logits and greedy text, however the prompt is cut."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.oracles import checkpoints
from tests.worker.models.running import greedy_of, logits_of
from worker.models import FAMILIES, load_model

TINY = Path(__file__).parents[3].parent / "shared" / "models" / "tiny"
TOLERANCE = 1e-4
# Transformers itself is 1.1e-4 from what it computes in float64 there.
TOLERANCES = {"gemma4_text": 2e-4}

CUTS = {
    "one pass": [],
    "17 and the rest": [17],
    "18, 19": [18, 19],
    "31": [31],
    "32": [32],
    "33": [33],
    "sevens": [7, 14, 21, 28, 35],
    "token by token": list(range(1, 64)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", checkpoints.names())
def test_oracle_logits_are_those_of_transformers(name: str, cut: str, tmp_path: Path) -> None:
    loaded = load_model(checkpoints.write_case(name, tmp_path / name))
    expected = checkpoints.reference(name)
    found = logits_of(loaded.model, expected["input_ids"], CUTS[cut])
    assert np.abs(found - expected["logits"]).max() < TOLERANCE


@pytest.mark.parametrize("name", checkpoints.names())
def test_oracle_greedy_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    loaded = load_model(checkpoints.write_case(name, tmp_path / name))
    expected = checkpoints.reference(name)
    assert greedy_of(loaded.model, expected["input_ids"], 16) == expected["greedy_ids"].tolist()


@pytest.mark.parametrize("name", checkpoints.names())
def test_oracle_both_config_dialects_mean_the_same_model(name: str, tmp_path: Path) -> None:
    ids = checkpoints.reference(name)["input_ids"]
    modern = load_model(checkpoints.write_case(name, tmp_path / "modern"))
    legacy = load_model(checkpoints.write_case(name, tmp_path / "legacy", dialect="legacy", shards=2))
    assert np.array_equal(logits_of(modern.model, ids, []), logits_of(legacy.model, ids, []))


@pytest.mark.parametrize("name", checkpoints.names())
def test_oracle_a_prompt_longer_than_trained_for_needs_its_length_announced_only_where_rope_depends_on_it(
    name: str, tmp_path: Path
) -> None:
    model = load_model(checkpoints.write_case(name, tmp_path / name)).model
    depends = checkpoints.case(name)[0]["rope_parameters"].get("rope_type") in ("dynamic", "longrope")
    assert (model.regime(8) == model.regime(40)) == (not depends)
    assert model.regime(8) == model.regime(24)


def tiny_models() -> list[Any]:
    """Model directories of the pool beside this checkout whose family is served here."""
    if not TINY.is_dir():
        missing = pytest.mark.skip(
            reason="no pool of tiny models beside this checkout; the cases here suffice"
        )
        return [pytest.param("none", marks=missing)]
    configs = sorted(TINY.glob("*/config.json"))
    return [one.parent.name for one in configs if json.loads(one.read_text())["model_type"] in FAMILIES]


@pytest.mark.parametrize("cut", ["one pass", "17 and the rest", "token by token"])
@pytest.mark.parametrize("name", tiny_models())
def test_oracle_shared_tiny_models_agree_with_transformers(name: str, cut: str) -> None:
    loaded = load_model(TINY / name)
    reference = mx.load(str(TINY / name / "reference" / "reference.safetensors"))
    assert isinstance(reference, dict)
    ids = np.array(reference["input_ids"])
    found = logits_of(loaded.model, ids, CUTS[cut])
    assert np.abs(found - np.array(reference["logits"])).max() < TOLERANCES.get(name, TOLERANCE)
    greedy = reference["greedy_ids"].tolist()
    assert greedy_of(loaded.model, ids, len(greedy)) == greedy
