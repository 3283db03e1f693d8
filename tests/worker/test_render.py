"""A worker asked about text alone: tokenize, detokenize, template, and messages that its template refuses."""

from pathlib import Path

import pytest

from shared.errors import ErrorCode, Refused
from shared.wire import ChatPrompt, TextPrompt
from tests.oracles.checkpoints import write_case
from tests.worker.asking import ask, finish, request, run, served

REFUSES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }};{% endfor %}"
)
TWO_USERS = ChatPrompt([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_case("llama_tied", tmp_path_factory.mktemp("render") / "model")


@pytest.fixture(scope="module")
def refusing_dir(tmp_path_factory) -> Path:
    folder = write_case("llama_tied", tmp_path_factory.mktemp("refusing") / "model")
    (folder / "chat_template.jinja").write_text(REFUSES, encoding="utf-8")
    return folder


def test_tokenize_text_and_messages_as_an_answer_would_read_them(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            for prompt in (TextPrompt("the cat 東"), ChatPrompt(TWO_USERS.messages[:1])):
                text, ids = await pipeline.render(prompt)
                usage = finish(await ask(pipeline, request(prompt=prompt, max_tokens=1))).usage
                assert usage.prompt_tokens == len(ids)
                back = await pipeline.detokenize(ids)
                assert back.text == text
                assert b"".join(back.pieces).decode() == text

    run(body)


def test_template_without_the_beginning_of_an_answer(model_dir):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            whole, _ = await pipeline.render(TWO_USERS)
            text, _ = await pipeline.render(TWO_USERS, add_generation_prompt=False)
            assert whole == f"{text}<|im_start|>assistant\n"

    run(body)


@pytest.mark.parametrize("ids", [[1 << 30], [-1], [0, 10_000]])
def test_detokenize_refuses_what_is_no_token(model_dir, ids):
    async def body() -> None:
        async with served(model_dir) as pipeline:
            with pytest.raises(Refused) as refused:
                await pipeline.detokenize(ids)
            assert refused.value.failure.code is ErrorCode.INVALID_REQUEST

    run(body)


def test_normalise_is_for_each_model_to_say(refusing_dir):
    async def body() -> None:
        async with served(refusing_dir) as pipeline:
            assert (await pipeline.render(TWO_USERS))[0] == "a\n\nb;"
        async with served(refusing_dir, messages="as_sent") as pipeline:
            with pytest.raises(Refused, match="roles must alternate") as refused:
                await pipeline.prepare(request(prompt=TWO_USERS))
            assert refused.value.failure.code is ErrorCode.TEMPLATE_FAILED

    run(body)
