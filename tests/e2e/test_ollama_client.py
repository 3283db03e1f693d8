"""Ollama's own Python client asks for each feature, against the fake worker; and what it does not ask, over HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.e2e.real import serving
from tests.oracles import encoders
from tests.process.harness import Served, served, until

PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ARGUMENTS = {"place": "Zürich } 東京", "n": {"a": [1, {}]}}
CALLS = [["get_weather", json.dumps(ARGUMENTS)]]
HI = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    script = {"tokens": 4, "reasoning": 1, "calls": CALLS}
    with served(tmp_path_factory.mktemp("ollama"), script, {"b": {}}, keepalive_s=0.05) as server:
        server.wait_state("ready")
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url, trust_env=False)
    yield client
    client._client.close()


def streamed(client: ollama.Client, **asked: Any) -> tuple[str, str, list[Any], Any]:
    parts = list(client.chat(model="fake", stream=True, options={"seed": 7}, **asked))
    text = "".join(part.message.content or "" for part in parts)
    thinking = "".join(part.message.thinking or "" for part in parts)
    calls = [call for part in parts for call in part.message.tool_calls or []]
    return text, thinking, calls, parts[-1]


def test_ollama_chat_is_the_same_streamed_and_not(client: ollama.Client) -> None:
    whole = client.chat(model="fake", messages=HI, options={"seed": 7}, tools=[WEATHER])
    text, thinking, calls, last = streamed(client, messages=HI, tools=[WEATHER])
    assert (text, thinking) == (whole.message.content, whole.message.thinking)
    assert len(text.split()) == 3
    assert len(thinking.split()) == 1
    assert calls == whole.message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [("get_weather", ARGUMENTS)]
    assert (last.done, last.done_reason, last.model) == (True, "stop", "fake")
    assert (last.prompt_eval_count, last.eval_count) == (whole.prompt_eval_count, whole.eval_count)
    assert last.total_duration >= last.eval_duration > 0


def test_ollama_generate_is_the_same_streamed_and_not(client: ollama.Client) -> None:
    asked: dict[str, Any] = {
        "model": "fake:latest",
        "prompt": "hello",
        "options": {"seed": 7, "num_predict": 3},
    }
    whole = client.generate(**asked)
    parts = list(client.generate(**asked, stream=True))
    assert "".join(part.response for part in parts) == whole.response
    assert "".join(part.thinking or "" for part in parts) == whole.thinking
    assert parts[-1].done_reason == whole.done_reason == "length"
    assert whole.eval_count == 3


def test_ollama_logprobs_stand_with_their_text(client: ollama.Client) -> None:
    found = client.chat(model="fake", messages=HI, logprobs=True, top_logprobs=2)
    assert found.logprobs is not None
    assert len(found.logprobs) == 3
    assert len(found.logprobs[0].top_logprobs or []) == 2


def test_ollama_loads_and_lets_go_without_a_prompt(server: Served, client: ollama.Client) -> None:
    loaded = client.generate(model="b", prompt="")
    assert (loaded.done, loaded.done_reason, loaded.response) == (True, "load", "")
    assert {model.model for model in client.ps().models} >= {"b"}
    gone = client.chat(model="b", messages=[], keep_alive=0)
    assert (gone.done_reason, gone.message.content) == ("unload", "")
    server.wait_phase("b", "absent")
    assert until(lambda: "b" not in {model.model for model in client.ps().models}, "b has left")


def test_ollama_tells_of_a_model_that_is_kept_beyond_all_dates(server: Served, client: ollama.Client) -> None:
    client.chat(model="fake", messages=[], keep_alive=1e300)
    [row] = [model for model in client.ps().models if model.model == "org/fake-1b"]
    assert row.expires_at is not None
    assert row.expires_at.year == 9999


def test_ollama_lists_shows_and_tells_its_version(server: Served, client: ollama.Client) -> None:
    listed = {model.model: model for model in client.list().models}
    assert set(listed) == {"org/fake-1b", "b"}
    assert listed["b"].details is not None
    assert listed["b"].details.family == "llama"
    shown = client.show("fake:latest")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.context_length"] == 4096
    assert "completion" in (shown.capabilities or [])
    assert server.http.get("/api/version").json()["version"].count(".") == 2


def test_ollama_head_says_that_something_is_here(server: Served) -> None:
    for path in ("/", "/api/tags", "/api/version"):
        answer = server.http.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_ollama_streams_are_lines_without_comments(server: Served) -> None:
    asked = {"model": "fake", "messages": [{"role": "user", "content": 'x fake:{"prefill_ms": 300}'}]}
    answer = server.http.post("/api/chat", json=asked)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert all(json.loads(line)["model"] == "fake" for line in answer.text.splitlines())


WRONG: list[tuple[str, str, dict[str, Any], int]] = [
    ("POST", "/api/chat", {"model": "nobody", "messages": HI}, 404),
    ("POST", "/api/generate", {"model": "nobody", "prompt": ""}, 404),
    ("POST", "/api/show", {"model": "nobody"}, 404),
    ("POST", "/api/show", {}, 400),
    ("POST", "/api/chat", {"messages": 5}, 400),
    ("POST", "/api/pull", {"model": "llama3.2"}, 400),
    ("POST", "/api/create", {"model": "x"}, 501),
    ("POST", "/api/copy", {}, 501),
    ("POST", "/api/push", {}, 501),
    ("DELETE", "/api/delete", {"model": "x"}, 501),
    ("POST", "/api/nothing", {}, 404),
    ("GET", "/api/chat", {}, 405),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), WRONG)
def test_ollama_errors_have_its_shape(
    server: Served, method: str, path: str, body: dict[str, Any], status: int
) -> None:
    answer = server.http.request(method, path, json=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert isinstance(answer.json()["error"], str)


def test_ollama_client_raises_its_own_error_also_in_a_stream(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="nobody") as caught:
        client.chat(model="nobody", messages=HI)
    assert caught.value.status_code == 404
    broken = [{"role": "user", "content": 'x fake:{"fail_after": 1}'}]
    with pytest.raises(ollama.ResponseError, match="as told"):
        list(client.chat(model="fake", messages=broken, stream=True))


def test_ollama_embeds_with_a_real_encoder(tmp_path: Path) -> None:
    with serving(encoders.write_case("bert", tmp_path / "bert"), tmp_path) as server:
        client = ollama.Client(host=server.url, trust_env=False)
        both = client.embed(model="bert", input=list(encoders.TEXTS[:2]))
        one = client.embed(model="bert:latest", input=encoders.TEXTS[1])
        old = client.embeddings(model="bert", prompt=encoders.TEXTS[1])
        short = client.embed(model="bert", input="a", dimensions=8)
        cut = client.embed(model="bert", input="word " * 500)
        none = client.embed(model="bert", input="")
        assert [len(row) for row in both.embeddings] == [32, 32]
        assert both.embeddings[1] == pytest.approx(one.embeddings[0], abs=1e-6)
        assert list(old.embedding) == pytest.approx(one.embeddings[0], abs=1e-6)
        assert (len(short.embeddings[0]), len(cut.embeddings), list(none.embeddings)) == (8, 1, [])
        assert both.prompt_eval_count > one.prompt_eval_count > 0
        with pytest.raises(ollama.ResponseError) as caught:
            client.embed(model="bert", input="word " * 500, truncate=False)
        assert caught.value.status_code == 400
        assert client.show("bert").capabilities == ["embedding"]
        client._client.close()
