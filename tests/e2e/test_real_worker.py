"""The whole of it with the real worker on tiny models: SDK, crash, disconnect, many clients, broken models."""

import asyncio
import concurrent.futures
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from parent.workers.client import WorkerClient
from shared import wire
from tests.e2e.real import serving
from tests.oracles.checkpoints import reference, write_case
from tests.process.harness import DEADLINE_S, Served, chat, content, is_running, until

CASE = "llama_tied"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return write_case(CASE, tmp_path_factory.mktemp("real") / "tiny")


@pytest.fixture(scope="module")
def server(model_dir, tmp_path_factory) -> Iterator[Served]:
    with serving(model_dir, tmp_path_factory.mktemp("served")) as running:
        running.wait_state("ready")
        yield running


@pytest.fixture
def sdk(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
        yield client


def test_oracle_greedy_text_reaches_the_official_sdk(sdk, model_dir):
    expected = reference(CASE)
    greedy = expected["greedy_ids"].tolist()
    if 2 in greedy:
        greedy = greedy[: greedy.index(2)]
    from worker.text.detokenizer import DetokenizerFactory
    from worker.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_dir)
    detokenizer = DetokenizerFactory(tokenizer).new()
    text = "".join(map(detokenizer.feed, greedy)) + detokenizer.flush()
    answer = sdk.completions.create(
        model="tiny", prompt=expected["input_ids"].tolist(), max_tokens=len(greedy), temperature=0
    )
    assert answer.choices[0].text == text
    assert answer.usage.prompt_tokens == len(expected["input_ids"])


def test_cache_and_stats_say_of_each_prompt_where_it_differs_from_what_is_kept(server):
    common = list(range(40, 140))
    for last in (ord("a"), ord("b")):  # the tiny checkpoint's tokens are bytes
        asked = {"prompt": [*common, last, 9, 9], "max_tokens": 1, "temperature": 0}
        server.http.post("/v1/completions", json={"model": "tiny", **asked}).raise_for_status()
    of_one = server.http.get("/admin/workers/tiny/cache").json()
    assert server.http.get("/stats").json() == {"models": {"tiny": of_one}}
    newest = of_one["lookups"][0]
    assert (newest["prompt_tokens"], newest["common"]) == (103, 100)
    assert 0 < newest["reused"] <= 100
    assert newest["kept"] != newest["asked"]
    assert newest["reason"]
    assert server.http.get("/admin/workers/nobody/cache").status_code == 404


def test_the_official_sdk_streams_what_it_gets_whole(sdk):
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "the cat"}],
        "max_tokens": 30,
        "seed": 5,
        "temperature": 1.0,
    }
    whole = sdk.chat.completions.create(**asked)
    with sdk.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    usages = [c.usage for c in chunks if c.usage]
    assert usages[-1].completion_tokens == whole.usage.completion_tokens


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], 200),
        ([{"role": "user", "content": "x" * 5000}], 400),
    ],
)
def test_refusals_of_the_worker_have_the_protocols_shape(server, messages, status):
    for stream in (False, True):
        answer = server.http.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 2, "stream": stream}
        )
        assert answer.status_code == status
        if status == 400:
            error = answer.json()["error"]
            assert error["code"] == "context_length_exceeded" or "context" in error["code"]
            assert "tokens" in error["message"]


def test_fifty_clients_with_unlike_requests_get_what_each_gets_alone(server):
    """Greedy and sampled, long and short, with and without stops: bugs.md A21, A22."""
    asked = []
    for n in range(50):
        body = chat("the hat and the cat " * (1 + n % 7), seed=n, max_tokens=5 + n % 20)
        body["temperature"] = 0 if n % 3 == 0 else 0.9
        if n % 4 == 1:
            body |= {"top_k": 20, "top_p": 0.9, "min_p": 0.02}
        if n % 5 == 2:
            body["stop"] = ["a", "th"]
        asked.append(body)

    def ask(body: dict) -> tuple[str, str]:
        choice = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        together = list(pool.map(ask, asked))
    alone = [ask(body) for body in asked]
    assert together == alone


def test_a_client_disconnect_stops_the_work_at_once(server):
    """The engine's token counter stands still once the row of the leaver is gone."""
    body = json.dumps(chat("the", stream=True, max_tokens=400, temperature=1.5, seed=3)).encode()
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address) as raw:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        raw.sendall(head.encode() + body)
        assert raw.recv(4096)
    until(lambda: server.engine()["in_flight"] == 0, "the request is gone from the parent")
    until(lambda: server.engine()["stats"]["active"] == 0, "the row is gone from the engine")


def test_crash_of_the_real_worker_in_mid_stream_does_not_show_in_the_text(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_state("ready")
        asked = chat("the cat", stream=True, max_tokens=460, temperature=1.2, seed=9)
        whole = content(server.http.post("/v1/chat/completions", json=asked).text)
        received = []
        with server.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            for line in answer.iter_lines():
                received.append(line)
                if line.startswith("data: ") and sum(each.startswith("data: ") for each in received) == 4:
                    server.kill_worker()
        assert content("\n".join(received)) == whole
        assert "data: [DONE]" in received
        engine = server.wait_state("ready")
        assert engine["last_exit"]["signal"] == "SIGKILL"
        assert engine["epoch"] == 2


def test_shutdown_lets_a_running_answer_of_the_real_worker_finish(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_state("ready")
        asked = chat("the cat", stream=True, max_tokens=400, temperature=1.2, seed=9)
        with server.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "data: [DONE]" in rest
        assert server.process.wait(DEADLINE_S) == 0
        assert not list((server.data_dir / "run").glob("*.sock"))


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped by SIGSTOP"])
def test_shutdown_by_kill_of_the_parent_leaves_no_real_worker(model_dir, tmp_path, stopped):
    with serving(model_dir, tmp_path, "--adopt-grace", "0s") as server:
        pid = server.wait_state("ready")["pid"]
        if stopped:
            if sys.platform != "linux":
                pytest.skip("only Linux ends a stopped child with its parent")
            os.kill(pid, signal.SIGSTOP)
        server.process.kill()
        server.process.wait(DEADLINE_S)
        until(lambda: not is_running(pid), "the worker is gone")


def test_crash_by_a_stop_from_outside_is_no_crash_the_real_worker_goes_on(model_dir, tmp_path):
    """A worker that somebody stopped is woken; a request that comes meanwhile is answered by it."""
    with serving(model_dir, tmp_path, "--heartbeat", "2s") as server:
        pid = server.wait_state("ready")["pid"]
        os.kill(pid, signal.SIGSTOP)
        assert server.ask("the", max_tokens=3).status_code == 200
        engine = server.engine()
        assert (engine["epoch"], engine["pid"]) == (1, pid)
        until(lambda: "worker.stopped" in (tmp_path / "stderr").read_text(), "a word in the log")


def test_two_readers_of_one_worker_do_not_disturb_each_other(server):
    """The parent's, and another one that comes and goes."""

    async def direct() -> list[wire.Event]:
        client = WorkerClient(server.engine()["socket"])
        asked = wire.GenerateRequest(request_id="direct", prompt=wire.TextPrompt("the"), seed=1, max_tokens=3)
        async with await client.generate(asked) as stream:
            events = [event async for batch in stream for event in batch]
        client.close()
        return events

    assert server.ask("the", max_tokens=2).status_code == 200
    assert isinstance(asyncio.run(direct())[-1], wire.Finish)
    assert server.ask("the", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "The keeper counted the waves. " * 200_000}],
        [{"role": "user", "content": "a" * 6_000_000}],
        [{"role": "user", "content": "x"}] * 8000,
    ],
    ids=["prose", "one letter", "many messages"],
)
def test_a_prompt_far_too_long_is_refused_and_harms_nobody(server, messages):
    before = server.engine()
    answer = server.http.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert "context is 512 tokens" in answer.json()["error"]["message"]
    after = server.engine()
    assert (after["epoch"], after["pid"]) == (before["epoch"], before["pid"])
    assert server.ask("the", max_tokens=2).status_code == 200


BROKEN = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "not JSON": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "no model_type": (lambda d: (d / "config.json").write_text("{}"), "model_type"),
    "unknown family": (lambda d: edit(d, model_type="rwkv9"), "rwkv9"),
    "truncated weights": (lambda d: truncate(d / "model.safetensors"), "model.safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
    "wrong shapes": (lambda d: edit(d, hidden_size=128), "shape"),
}


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_ends_in_a_reason_and_not_in_restarts(tmp_path, name):
    """Either `mlxd serve` refuses it in one line, or the worker does and every request is told so."""
    spoil, word = BROKEN[name]
    folder = write_case(CASE, tmp_path / "broken")
    spoil(folder)
    try:
        with serving(folder, tmp_path) as server:
            engine = server.wait_state("failed")
            assert word in json.dumps(engine["reason"])
            assert engine["restarts"] == 0
            answer = server.ask()
            assert answer.status_code in (500, 503)
            assert word in answer.json()["error"]["message"]
            assert server.http.get("/health").status_code == 200
    except AssertionError as refused:
        text = str(refused)
        assert "mlxd: " in text, text
        assert word in text
        assert "Traceback" not in text


def test_a_model_directory_removed_under_a_running_worker(model_dir, tmp_path):
    """What is loaded goes on; a restart says what is missing; the server stays up."""
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder)
    with serving(folder, tmp_path) as server:
        server.wait_state("ready")
        shutil.rmtree(folder)
        assert server.ask("the", max_tokens=3).status_code == 200
        server.kill_worker()
        engine = server.wait_state("failed")
        assert "no such directory" in json.dumps(engine["reason"])
        assert server.http.get("/health").status_code == 200
        answer = server.ask("the")
        assert answer.status_code in (500, 503)
        assert "no such directory" in answer.json()["error"]["message"]
