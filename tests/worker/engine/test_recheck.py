"""The check of reused prompts: quiet where they are right, and loud where they are not."""

import logging

import mlx.core as mx
import pytest

from shared.logs import Plain
from shared.wire import TokenPrompt
from tests.oracles import checkpoints
from tests.worker.asking import GREEDY, ask, request, run, served
from worker.engine.recheck import TOLERANCE, recheck
from worker.layers.batch import solo
from worker.models import load_model

PROMPT = [10 + n * 7 % 240 for n in range(90)]


@pytest.mark.parametrize("case", ["llama_tied", "mistral_window", "rope_dynamic"])
def test_what_is_reused_is_what_was_computed(case, tmp_path, caplog):
    config, seed = checkpoints.case(case)
    folder = checkpoints.write_model({**config, "max_position_embeddings": 512}, seed, tmp_path / "model")

    async def body() -> None:
        async with served(folder, prefill_chunk=32, check_prefix=True) as pipeline:
            for name, prompt in (("first", PROMPT[:60]), ("second", PROMPT)):
                with caplog.at_level(logging.INFO):
                    await ask(
                        pipeline, request(name, prompt=TokenPrompt(prompt), max_tokens=2, sampling=GREEDY)
                    )

    run(body)
    told = [record for record in caplog.records if record.getMessage() == "prefix.checked"]
    assert [record.levelno for record in told] == [logging.INFO]
    assert "request_id=second" in Plain().format(told[0])


def test_keys_of_other_tokens_are_told(tmp_path, caplog):
    model = load_model(checkpoints.write_case("llama_tied", tmp_path)).model
    caches = model.make_caches()
    model(solo(mx.array(PROMPT[10:60]), caches))
    assert recheck(model, "wrong", PROMPT, caches, 50, 32) > TOLERANCE
    assert caplog.records[-1].levelno == logging.WARNING
    assert caches[0].offset == 50  # the row's own caches are untouched
