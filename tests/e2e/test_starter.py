"""The real starter model: what it answers, through the official SDK."""

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.real import serving
from tests.process.harness import Served

pytestmark = pytest.mark.slow

REFERENCE = json.loads((Path(__file__).parent / "starter_greedy.json").read_text())
"""Greedy answers of Hugging Face transformers 5.24 (float32), each up to its first near tie (margin 0.05)."""


@pytest.fixture(scope="module")
def server(starter_model, tmp_path_factory) -> Iterator[Served]:
    with serving(starter_model.path, tmp_path_factory.mktemp("starter")) as running:
        running.wait_state("ready")
        yield running


@pytest.fixture
def sdk(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        yield client


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["prompt"])
def test_oracle_greedy_answers_of_the_starter(sdk, case):
    answer = sdk.chat.completions.create(
        model="starter",
        messages=[{"role": "user", "content": case["prompt"]}],
        temperature=0,
        max_tokens=case["tokens"],
    )
    assert answer.model == "starter"
    assert answer.choices[0].message.content == case["text"]
    assert answer.usage.prompt_tokens == case["prompt_tokens"]


def test_a_streamed_answer_of_the_starter_names_paris(sdk):
    with sdk.chat.completions.create(
        model="starter",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "Paris" in text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_a_long_prompt_is_read_to_its_end(sdk):
    """About 700 tokens, more than one prefill chunk: the instruction stands last."""
    filler = "The weather report for the coast is long and of no importance here. " * 45
    answer = sdk.chat.completions.create(
        model="starter",
        messages=[{"role": "user", "content": filler + "\n\nWhat is the capital of France? Answer briefly."}],
        temperature=0,
        max_tokens=24,
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 600
