"""What a request may ask of sampling, what it may not, and whose word counts where several speak."""

import json
import math
from pathlib import Path

import pytest

from shared.errors import ErrorCode, Refused
from shared.wire import Curve, Hlg, Sampling
from worker.context import read_sampling_defaults
from worker.engine.sequence import SamplingPlan
from worker.resolve import check_sampling, resolve_sampling

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        (Sampling(temperature=-0.1), "temperature", "0 or more"),
        (Sampling(temperature=NAN), "temperature", "is nan"),
        (Sampling(temperature=INF), "temperature", "is inf"),
        (Sampling(top_p=1.1), "top_p", "from 0 to 1"),
        (Sampling(top_p=NAN), "top_p", "is nan"),
        (Sampling(top_k=-1), "top_k", "0 or more"),
        (Sampling(min_p=2), "min_p", "from 0 to 1"),
        (Sampling(repetition_penalty=0), "repetition_penalty", "0.001"),
        (Sampling(repetition_penalty=NAN), "repetition_penalty", "is nan"),
        (Sampling(presence_penalty=NAN), "presence_penalty", "is nan"),
        (Sampling(frequency_penalty=INF), "frequency_penalty", "is inf"),
        (Sampling(repetition_window=-1), "repetition_window", "0 or more"),
        (Sampling(xtc_probability=1.5), "xtc_probability", "from 0 to 1"),
        (Sampling(xtc_threshold=0.6), "xtc_threshold", "from 0 to 0.5"),
        (Sampling(logit_bias={100: 1.0}), "logit_bias", "token id 100 is outside the vocabulary of 100"),
        (Sampling(logit_bias={-1: 1.0}), "logit_bias", "token id -1"),
        (Sampling(logit_bias={5: NAN}), "logit_bias", "of token 5 is nan"),
        (Sampling(logit_bias={5: 101}), "logit_bias", "from -100 to 100"),
        (Sampling(logit_bias=dict.fromkeys(range(301), 1.0)), "logit_bias", "301 entries; 300 are allowed"),
        (Sampling(tone=Hlg(width=NAN)), "tone", "width of tone is nan"),
        (Sampling(tone=Hlg(toe=0)), "tone", "toe of tone is 0"),
        (Sampling(tone=Curve(((0, 0),))), "tone", "1 points"),
        (Sampling(tone=Curve(((0, 0), (0, 1)))), "tone", "x has to rise"),
        (Sampling(tone=Curve(((0, 5), (9, 1)))), "tone", "y must not fall"),
        (Sampling(tone=Curve(((0, 0), (NAN, 1)))), "tone", "not from -1000"),
        (Sampling(tone=Curve(floor=0)), "tone", "floor of tone"),
    ],
)
def test_what_means_nothing_is_refused_by_name(asked, param, words):
    with pytest.raises(Refused) as caught:
        check_sampling(asked, 100)
    failure = caught.value.failure
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert words in failure.message


def test_everything_at_its_ends_is_taken():
    check_sampling(Sampling(), 100)
    check_sampling(
        Sampling(0, 1, 0, 0, 1, -2, 2, 0, 0, 0, 1, 0.5, dict.fromkeys(range(100), -100.0), Hlg(width=None)),
        100,
    )
    check_sampling(Sampling(100, 1e-300, 1 << 30, 1, tone=Curve()), 100)


def test_the_request_counts_before_the_model_and_the_model_before_what_is_built_in(tmp_path: Path):
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.3, "top_k": 7, "repetition_penalty": 1.05, "min_p": "x"}))
    defaults = read_sampling_defaults(tmp_path)
    assert defaults == Sampling(temperature=0.3, top_k=7, repetition_penalty=1.05)
    plan = resolve_sampling(Sampling(temperature=0, top_p=0.5), defaults)
    assert plan == SamplingPlan(0.0, 0.5, 7, 0.0, repetition_penalty=1.05)
    assert resolve_sampling(Sampling(repetition_penalty=1.0), defaults).repetition_penalty == 1
    assert resolve_sampling(Sampling(), Sampling()) == SamplingPlan(temperature=0.7)


@pytest.mark.parametrize("text", ['{"repetition_penalty": 0}', '{"repetition_penalty": true}', "[]", "{"])
def test_a_model_file_that_says_nonsense_says_nothing(tmp_path: Path, text):
    (tmp_path / "generation_config.json").write_text(text)
    assert read_sampling_defaults(tmp_path) == Sampling()


def test_bias_and_tone_come_through():
    asked = Sampling(
        logit_bias={3: 1.5, 9: -100}, tone=Hlg(offset=2), presence_penalty=0.5, presence_window=0
    )
    plan = resolve_sampling(asked, Sampling(), xtc_keep=(2,), logprobs=4)
    assert plan.logit_bias == ((3, 1.5), (9, -100))
    assert (plan.tone, plan.presence_window, plan.xtc_keep, plan.logprobs) == (Hlg(offset=2), 0, (2,), 4)
