"""A served fake model, asked as clients do: SDK, SSE, waiting for a load, limits, discovery, wrong requests."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from shared import wire
from shared.version import WIRE
from tests.fakes.worker import expected_text
from tests.process.harness import DEADLINE_S, chat, content, frames, served, until

ID = "org/fake-1b"


def test_the_openai_sdk_chats_streams_completes_and_lists(tmp_path: Path) -> None:
    with (
        served(tmp_path, {"reasoning": 2}) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        messages = [{"role": "user", "content": "hello"}]
        whole = client.chat.completions.create(model="fake", messages=messages, seed=7)  # type: ignore[arg-type]
        assert whole.model == "fake"
        assert whole.usage is not None
        assert whole.usage.completion_tokens_details is not None
        assert whole.usage.completion_tokens_details.reasoning_tokens == 2
        chunks = list(
            client.chat.completions.create(model="fake", messages=messages, seed=7, stream=True)  # type: ignore[arg-type]
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content
        assert {chunk.model for chunk in chunks} == {"fake"}
        assert chunks[-1].usage == whole.usage
        asked = client.chat.completions.create(
            model="fake",
            messages=messages,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        *most, last = list(asked)
        assert last.choices == []
        assert last.usage is not None
        assert all(chunk.usage is None for chunk in most)
        text = client.completions.create(model="fake", prompt="hello", seed=7, max_tokens=3)
        assert text.choices[0].text == expected_text(wire.TextPrompt("hello"), 7, 3)
        assert text.choices[0].finish_reason == "length"
        parts = client.completions.create(model="fake", prompt="hello", seed=7, stream=True)
        assert "".join(part.choices[0].text for part in parts) == expected_text(
            wire.TextPrompt("hello"), 7, 12
        )
        listed = client.models.list().data
        assert [model.id for model in listed] == [ID]
        assert client.models.retrieve(ID).id == ID
        with pytest.raises(openai.NotFoundError, match="no model 'fakee'; did you mean fake"):
            client.chat.completions.create(model="fakee", messages=messages)  # type: ignore[arg-type]


def test_the_sdk_sees_a_failure_in_mid_stream(tmp_path: Path) -> None:
    with served(tmp_path, {"fail_after": 3}) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "x"}], stream=True
            )
            with pytest.raises(openai.APIError, match="the engine raised, as told"):
                list(stream)
        body = server.ask("x", stream=True).text
        assert body.splitlines()[-2].startswith('data: {"error":')
        whole = server.ask("x")
        assert whole.status_code == 500
        assert whole.json()["error"]["message"] == "the engine raised, as told"


def test_a_stream_that_waits_for_a_load_gets_headers_and_comments_then_its_answer(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 1500}, keepalive_s=0.2) as server:
        with server.http.stream("POST", "/v1/chat/completions", json=chat("x", stream=True)) as answer:
            assert answer.status_code == 200
            pieces = answer.iter_text()
            assert next(pieces).startswith(": place 1 of 1 for org/fake-1b; ")
            assert server.engine()["state"] in ("spawning", "loading")
            body = "".join(pieces)
        assert len(content(body).split()) == 12


def test_a_silent_prefill_is_kept_alive_after_the_role_has_left(tmp_path: Path) -> None:
    with served(tmp_path, {"prefill_ms": 700, "prefill_chunks": 2}, keepalive_s=0.2) as server:
        server.wait_state("ready")
        body = server.ask("x", stream=True).text
        events = body.split("\n\n")
        assert '"role":"assistant"' in events[0]
        assert events[1:3] == [": prefill 1/2", ": prefill 2/2"]
        assert events[3] == ": keep-alive"


def test_the_wait_for_a_load_is_bounded_plain_and_streamed(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 60_000}, load_wait_s=0.6, keepalive_s=0.2) as server:
        plain = server.ask()
        assert plain.status_code == 503
        assert plain.headers["retry-after"] == "5"
        assert plain.json()["error"]["code"] == "loading"
        streamed = server.ask(stream=True)
        assert streamed.status_code == 200
        assert frames(streamed.text)[-1]["error"]["code"] == "loading"
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()["state"]) == (503, "loading")
        assert server.http.get("/health").json()["status"] == "ok"


def test_more_requests_than_may_wait_are_refused_with_retry_after(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 2000}, queue_limit=1, max_rows=1) as server:
        server.wait_state("loading")
        with ThreadPoolExecutor(6) as threads:
            answers = list(threads.map(lambda n: server.ask(f"q {n}"), range(6)))
        statuses = sorted(answer.status_code for answer in answers)
        assert statuses == [200, 429, 429, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "resource_admission"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_50_mb_is_refused_with_413(tmp_path: Path, declared: bool) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        piece = b" " * 1_000_000

        def body() -> object:
            for _ in range(50):
                yield piece

        data = piece * 50 if declared else body()
        answer = server.http.post("/v1/chat/completions", content=data)  # type: ignore[arg-type]
        assert answer.status_code == 413
        assert answer.json()["error"]["code"] == "too_large"
        assert server.ask().status_code == 200


def test_what_the_worker_refuses_comes_as_status_and_json_streamed_or_not(tmp_path: Path) -> None:
    with served(tmp_path, {"refuse": "template_failed"}) as server:
        for stream in (False, True):
            answer = server.ask("x", stream=stream)
            assert answer.status_code == 400
            assert answer.json()["error"] == {
                "message": "refused as told: template_failed",
                "type": "invalid_request_error",
                "param": "messages",
                "code": "template_failed",
            }


def test_an_unreadable_event_is_an_error_and_the_server_lives(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        broken = server.ask('x fake:{"garbage":true}', stream=True)
        assert "cannot be read" in broken.text  # in a frame, or whole where nothing had left yet
        assert server.ask("y").status_code == 200


def test_models_are_found_raw_encoded_and_by_alias_unknown_ones_are_404(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        for name in (ID, ID.replace("/", "%2F"), "fake"):
            row = server.http.get(f"/v1/models/{name}").json()
            assert (row["id"], row["context_length"], row["state"]) == (ID, 4096, "resident")
            assert row["gen_defaults"]["temperature"] == 1.0
        unknown = server.http.get("/v1/models/nope/nope")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("sent", [None, "fake", ID])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_model_in_answers_is_the_name_the_client_sent(
    tmp_path: Path, path: str, sent: str | None
) -> None:
    with served(tmp_path) as server:
        fields = {"model": sent} if sent else {}
        body = chat("x") | {"prompt": "x"} | fields
        assert server.http.post(path, json=body).json()["model"] == (sent or ID)
        streamed = server.http.post(path, json=body | {"stream": True}).text
        assert {frame["model"] for frame in frames(streamed)} == {sent or ID}


def test_unknown_routes_wrong_methods_and_doubled_prefixes_say_what_to_do(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        missing = server.http.get("/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        doubled = server.http.post("/v1/v1/chat/completions", json={})
        assert doubled.status_code == 404
        assert "ask for /v1/chat/completions" in doubled.json()["error"]["message"]
        wrong = server.http.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert "it takes POST" in wrong.json()["error"]["message"]
        unknown = server.http.post("/admin/workers/who/restart")
        assert unknown.status_code == 404


def test_every_answer_echoes_the_request_id_and_says_nosniff(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        given = server.http.get("/health", headers={"x-request-id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        bad = server.http.get("/nothing", headers={"x-request-id": "not one word"})
        assert len(bad.headers["x-request-id"]) == 24
        streamed = server.ask(stream=True)
        assert streamed.headers["x-request-id"]
        assert streamed.headers["x-content-type-options"] == "nosniff"
        assert streamed.headers["content-type"].startswith("text/event-stream")


def test_foreign_hosts_and_origins_are_refused(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for headers, code in [
            ({"host": "evil.example"}, "invalid_host"),
            ({"origin": "https://evil.example"}, "cross_origin"),
            ({"origin": "http://["}, "cross_origin"),
            ({"sec-fetch-site": "cross-site"}, "cross_site"),
        ]:
            answer = server.http.post("/v1/chat/completions", json=chat("x"), headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
        own = server.http.get("/health", headers={"origin": server.url, "sec-fetch-site": "same-origin"})
        assert own.status_code == 200


def test_an_operators_restart_drains_and_brings_a_fresh_worker(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 60, "ms_per_token": 10}) as server:
        first = server.wait_state("ready")["pid"]
        with server.http.stream("POST", "/v1/chat/completions", json=chat("x", stream=True)) as answer:
            pieces = answer.iter_text()
            body = next(pieces)
            restart = server.http.post("/admin/workers/org%2Ffake-1b/restart")
            assert restart.json() == {"model": ID, "state": "draining"}
            body += "".join(pieces)
        assert len(content(body).split()) == 60
        engine = until(
            lambda: now if (now := server.engine())["epoch"] == 2 and now["state"] == "ready" else None,
            "the next worker",
        )
        assert engine["pid"] != first
        assert engine["restarts"] == 0
        assert server.ask("x").status_code == 200


def test_a_seed_is_drawn_where_none_is_given_and_kept_where_one_is(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        for _ in range(2):
            server.http.post("/v1/completions", json={"prompt": "x"})
        server.http.post("/v1/completions", json={"prompt": "x", "seed": -1})
        first, second, third = (entry["seed"] for entry in server.wait_journal("request", 3))
        assert first != second
        assert third == 2**63 - 1


def test_a_hundred_streams_at_once_are_all_answered(tmp_path: Path) -> None:
    with served(tmp_path, {"ms_per_token": 2}, queue_limit=128) as server:
        server.wait_state("ready")

        def one(number: int) -> str:
            with httpx2.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False) as client:
                return client.post("/v1/chat/completions", json=chat(f"q {number}", stream=True)).text

        with ThreadPoolExecutor(100) as threads:
            bodies = list(threads.map(one, range(100)))
        expected = [
            expected_text(wire.ChatPrompt([{"role": "user", "content": f"q {n}"}]), 7, 12) for n in range(100)
        ]
        assert [content(body) for body in bodies] == expected


def test_engine_says_everything_known(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        engine = server.wait_state("ready")
        assert engine["model"]["id"] == ID
        assert engine["facts"]["family"] == "fake"
        assert engine["blas"] == "none"
        assert engine["wire"] == WIRE
        assert Path(engine["socket"]).is_socket()
        assert json.loads((server.data_dir / "mlxd.lock").read_text())["url"] == server.url
