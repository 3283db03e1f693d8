"""32 streams at once over four protocols: each text is that of its request alone, also when the worker is killed."""

import concurrent.futures
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.asking import Asked, Server, user
from tests.conformance.dialect_openai import chat_arguments
from tests.conformance.dialects import DIALECTS
from tests.conformance.served import write_tiny
from tests.e2e.real import serving
from tests.process.harness import DEADLINE_S, Served

COLUMNS = ("chat", "completions", "responses", "anthropic")
STREAMS = 32


def asked(number: int, tokens: int) -> Asked:
    """Prompts of unlike length; answers end at unlike places."""
    words = f"{number} the hat and the cat " * (1 + number % 7)
    return Asked(user(words), max_tokens=tokens + number % 5)


def streamed(server: Server, number: int, tokens: int) -> str:
    dialect = DIALECTS[COLUMNS[number % len(COLUMNS)]]
    return dialect.streamed(server, asked(number, tokens)).text


def together(server: Server, tokens: int) -> "tuple[concurrent.futures.Executor, list[Any]]":
    """All of them at once, each on its own connection, begun at the same moment."""
    pool = concurrent.futures.ThreadPoolExecutor(STREAMS)
    ready = threading.Barrier(STREAMS)

    def ask(number: int) -> str:
        ready.wait(DEADLINE_S)
        return streamed(server, number, tokens)

    return pool, [pool.submit(ask, number) for number in range(STREAMS)]


def killed_under(running: Served, server: Server, tokens: int) -> str:
    """The text of one more stream, which kills the worker when its third piece has come."""
    arguments = chat_arguments(server, asked(0, tokens))
    text, pieces = "", 0
    for chunk in server.openai.chat.completions.create(**arguments, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            pieces += bool(choice.delta.content)
            if pieces == 3 and choice.delta.content:
                running.kill_worker()
    assert pieces > 3
    return text


def check(running: Served, tokens: int) -> None:
    """Alone; together; together with the worker killed while rows of it decode."""
    server = Server(running.url)
    try:
        alone = [streamed(server, number, tokens) for number in range(STREAMS)]
        assert len(set(alone)) > STREAMS // 2, "the texts hardly differ"
        pool, answers = together(server, tokens)
        with pool:
            assert [answer.result() for answer in answers] == alone
        epoch = running.engine()["epoch"]
        pool, answers = together(server, tokens)
        with pool:
            assert killed_under(running, server, tokens) == alone[0]
            assert [answer.result() for answer in answers] == alone
        engine = running.wait_state("ready")
        assert engine["epoch"] == epoch + 1
        assert engine["last_exit"]["signal"] == "SIGKILL"
    finally:
        server.close()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Served]:
    with serving(write_tiny(tmp_path / "tiny"), tmp_path) as running:
        running.wait_state("ready")
        yield running


def test_streams_of_four_protocols_at_once_and_across_a_kill_are_each_as_alone(tiny: Served) -> None:
    check(tiny, 96)


@pytest.mark.slow
def test_streams_of_the_starter_at_once_and_across_a_kill_are_each_as_alone(
    starter_model, tmp_path: Path
) -> None:
    with serving(starter_model.path, tmp_path) as running:
        running.wait_state("ready")
        check(running, 10)
