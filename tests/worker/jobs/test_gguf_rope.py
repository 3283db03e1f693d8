"""Rope settings of GGUF files become config entries that rotate the same."""

import math
from typing import Any

import numpy as np
import pytest

from shared.model_config import normalise
from worker.jobs.gguf import Gguf, GgufError
from worker.jobs.gguf_config import ROPE_FREQS, Facts, llama3_factors
from worker.jobs.gguf_config import rope_parameters as read_rope
from worker.layers.rope import make_rope

BASE: dict[str, Any] = {"llama.rope.freq_base": 500000.0}
CONFIG = {"max_position_embeddings": 8192, "model_type": "llama"}
THETA = 500000.0


def rope_parameters(
    metadata: dict[str, Any], config: dict[str, Any], factors: list[float] | None
) -> dict[str, Any]:
    gguf = Gguf(3, {"general.architecture": "llama", **metadata}, {})
    tables = {} if factors is None else {ROPE_FREQS: factors}
    return read_rope(Facts(gguf, tables), config["max_position_embeddings"])


def freqs_of(rope: dict[str, Any], length: int = 1) -> np.ndarray:
    """Reciprocal frequencies of the loader's rope, [dims / 2], for heads of 64."""
    rotation = make_rope(normalise({**CONFIG, "rope_parameters": rope})["rope_parameters"], 64, 8192).at(
        length
    )
    if rotation.freqs is None:
        assert rotation.base is not None
        return rotation.base ** (np.arange(32) / 32) / rotation.scale
    return np.array(rotation.freqs)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": THETA}),
        ({"scaling.type": "none"}, {"rope_type": "default", "rope_theta": THETA}),
        (
            {"scaling.type": "linear", "scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0},
        ),
        ({"scaling.type": "linear", "scaling.factor": 1.0}, {"rope_type": "default", "rope_theta": THETA}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 2048,
                "scaling.yarn_beta_fast": 16.0,
            },
            {
                "rope_type": "yarn",
                "rope_theta": THETA,
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
                "beta_fast": 16.0,
            },
        ),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5},
            {
                "rope_type": "yarn",
                "rope_theta": THETA,
                "factor": 4.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 0.5 * (0.1 * math.log(4) + 1),
            },
        ),
    ],
)
def test_scaling_metadata_is_carried_over(metadata: dict[str, Any], expected: dict[str, Any]) -> None:
    given = {**BASE, **{f"llama.rope.{key}": value for key, value in metadata.items()}}
    assert rope_parameters(given, CONFIG, None) == expected


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_published_llama3_factors_are_recognised(factor: float) -> None:
    factors = np.float32(llama3_factors(32, THETA, factor, 1.0, 4.0, 8192)).tolist()
    rope = rope_parameters(BASE, CONFIG, factors)
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == (
        "llama3",
        factor,
        8192,
    )
    unscaled = THETA ** (np.arange(32) / 32)
    assert np.allclose(freqs_of(rope), unscaled * factors, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 9000])
def test_other_factors_rotate_exactly_as_the_file_says(length: int) -> None:
    factors = [1.0 + 0.1 * i for i in range(32)]
    rope = rope_parameters(BASE, CONFIG, factors)
    assert np.allclose(freqs_of(rope, length), THETA ** (np.arange(32) / 32) * factors, rtol=1e-6)
    parameters = normalise({**CONFIG, "rope_parameters": rope})["rope_parameters"]
    assert make_rope(parameters, 64, 8192).softmax_factor == 1.0


def test_factors_of_one_are_no_scaling() -> None:
    assert rope_parameters(BASE, CONFIG, [1.0] * 32) == {"rope_type": "default", "rope_theta": THETA}


@pytest.mark.parametrize(
    ("metadata", "factors", "message"),
    [
        ({"scaling.type": "longrope", "scaling.factor": 2.0}, None, "'longrope' cannot be carried over"),
        ({"scaling.type": "yarn", "scaling.factor": -1.0}, None, "with the factor -1"),
        ({"scaling.type": "yarn", "scaling.factor": 2.0}, [2.0] * 32, "together with"),
        ({"scaling.type": "linear", "scaling.factor": float("nan")}, None, "is nan"),
    ],
)
def test_what_cannot_be_carried_over_is_refused(
    metadata: dict[str, Any], factors: list[float] | None, message: str
) -> None:
    given = {**BASE, **{f"llama.rope.{key}": value for key, value in metadata.items()}}
    with pytest.raises(GgufError, match=message):
        rope_parameters(given, CONFIG, factors)
