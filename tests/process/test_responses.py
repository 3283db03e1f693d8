"""Responses over a real parent and a fake worker: what is stored, what goes on without its client, what survives."""

import json
import signal
from pathlib import Path
from typing import Any

import httpx2
import pytest

from shared import wire
from tests.fakes.worker import expected_text
from tests.process.harness import DEADLINE_S, Served, frames, served, until

SLOW: dict[str, Any] = {"ms_per_token": 20, "tokens": 30}
HELD = 'wait fake:{"hold_after": 2}'


def ask(server: Served, given: Any = "hi", /, **fields: Any) -> httpx2.Response:
    return server.http.post("/v1/responses", json={"input": given, "seed": 7, **fields})


def made(server: Served, given: Any = "hi", /, **fields: Any) -> dict[str, Any]:
    answer = ask(server, given, **fields)
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def fetched(server: Served, id: str) -> dict[str, Any]:
    answer = server.http.get(f"/v1/responses/{id}")
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    return response


def over(server: Served, id: str) -> dict[str, Any]:
    """The response in the background, once it is over."""

    def look() -> dict[str, Any] | None:
        response = fetched(server, id)
        return response if response["status"] not in ("queued", "in_progress") else None

    return until(look, f"{id} is over")


def text_of(response: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"]
    )


def oracle(*messages: tuple[str, str], tokens: int = 12) -> str:
    prompt = wire.ChatPrompt([{"role": role, "content": content} for role, content in messages])
    return expected_text(prompt, 7, tokens)


def error_of(answer: httpx2.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["message"]


def test_responses_follow_on_each_other_through_deaths_and_restarts(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        first = made(server, "one", instructions="Be brief.", model="fake")
        assert first["model"] == "fake"
        said = text_of(first)
        assert said == oracle(("system", "Be brief."), ("user", "one"))
        server.kill_worker()
        second = made(server, "two", previous_response_id=first["id"])
        past = [("user", "one"), ("assistant", said), ("user", "two")]
        assert text_of(second) == oracle(*past), "the instructions of before do not count any more"
    with served(tmp_path, adopt_grace_s=0) as server:
        server.wait_state("ready")
        assert fetched(server, first["id"]) == first
        third = made(server, "three", previous_response_id=second["id"])
        past += [("assistant", text_of(second)), ("user", "three")]
        assert text_of(third) == oracle(*past)
        server.process.kill()
        server.process.wait()
    with served(tmp_path) as server:
        fourth = made(server, [{"role": "user", "content": "four"}], previous_response_id=third["id"])
        past += [("assistant", text_of(third)), ("user", "four")]
        assert text_of(fourth) == oracle(*past)
        listed = server.http.get(f"/v1/responses/{third['id']}/input_items?order=asc").json()
        said = ["".join(part["text"] for part in item["content"]) for item in listed["data"]]
        assert said == [content for _, content in past[:5]]
        assert server.http.delete(f"/v1/responses/{second['id']}").json() == {
            "id": second["id"], "object": "response", "deleted": True
        }  # fmt: skip
        status, code, message = error_of(ask(server, previous_response_id=third["id"]))
        assert (status, code) == (404, "not_found")
        assert second["id"] in message
        assert fetched(server, third["id"]) == third


def test_responses_that_are_not_there_are_404_in_openais_shape(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        unstored = made(server, store=False)
        assert unstored["store"] is False
        for id in (unstored["id"], "resp_x", "a%2Fb"):
            for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
                answer = server.http.request(method, f"/v1/responses/{id}{path}")
                if id != "a%2Fb":
                    assert error_of(answer)[:2] == (404, "not_found")
                    assert id in answer.json()["error"]["message"]
                assert answer.status_code == 404
        assert error_of(ask(server, previous_response_id=unstored["id"]))[:2] == (404, "not_found")
        reference = [{"type": "item_reference", "id": unstored["output"][0]["id"]}]
        assert error_of(ask(server, reference))[:2] == (404, "not_found")


def test_responses_that_fail_or_are_left_are_not_stored(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        assert ask(server, 'x fake:{"fail_after": 1}').status_code == 500
        told = frames(ask(server, 'x fake:{"fail_after": 1}', stream=True).text)
        assert told[-1]["type"] == "response.failed"
        assert told[-1]["response"]["error"]["code"] == "server_error"
        body = {"input": HELD, "stream": True}
        with server.http.stream("POST", "/v1/responses", json=body, timeout=DEADLINE_S) as answer:
            first = next(line for line in answer.iter_lines() if line.startswith("data: "))
        server.wait_journal("cancelled")
        left = json.loads(first[6:])["response"]["id"]
        for id in (told[-1]["response"]["id"], left):
            assert server.http.get(f"/v1/responses/{id}").status_code == 404
        assert server.engine()["response_store"]["entries"] == 0


def test_responses_stream_goes_on_over_a_death_of_the_worker_and_is_stored_before_its_end(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        text = 'x fake:{"crash_after": 4, "reasoning": 2}'
        told = frames(ask(server, text, stream=True).text)
        assert [frame["sequence_number"] for frame in told] == list(range(len(told)))
        last = told[-1]
        assert last["type"] == "response.completed"
        assert text_of(last["response"]) == "".join(
            frame["delta"] for frame in told if frame["type"] == "response.output_text.delta"
        )
        assert fetched(server, last["response"]["id"]) == last["response"]
        assert {frame["type"] for frame in told[:2]} == {"response.created", "response.in_progress"}


# ---------------------------------------------------------------- background


def test_responses_in_the_background_go_on_without_a_client(tmp_path: Path) -> None:
    with served(tmp_path, SLOW) as server:
        server.wait_state("ready")
        body = {"input": "go on", "seed": 7, "background": True, "stream": True}
        seen = []
        with server.http.stream("POST", "/v1/responses", json=body, timeout=DEADLINE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    seen.append(json.loads(line[6:]))
                    if len(seen) == 7:
                        break
        assert [frame["type"] for frame in seen[:3]] == [
            "response.created", "response.queued", "response.in_progress"
        ]  # fmt: skip
        assert [frame["response"]["status"] for frame in seen[:3]] == ["queued", "queued", "in_progress"]
        id = seen[0]["response"]["id"]
        rest = frames(server.http.get(f"/v1/responses/{id}?stream=true&starting_after=6").text)
        told = seen + rest
        assert [frame["sequence_number"] for frame in told] == list(range(len(told)))
        whole = over(server, id)
        assert (whole["status"], whole["background"]) == ("completed", True)
        assert told[-1]["response"] == whole
        assert text_of(whole) == oracle(("user", "go on"), tokens=30)
        again = frames(server.http.get(f"/v1/responses/{id}?stream=true").text)
        assert again == told
        after = made(server, "and", previous_response_id=id)
        assert text_of(after) == oracle(
            ("user", "go on"), ("assistant", text_of(whole)), ("user", "and"), tokens=30
        )
    with served(tmp_path) as server:
        assert fetched(server, id) == whole
        status, code, message = error_of(server.http.get(f"/v1/responses/{id}?stream=true"))
        assert (status, code) == (400, "unsupported")
        assert "ask without stream" in message


def test_responses_in_the_background_are_cancelled_and_deleted(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        begun = made(server, HELD, background=True)
        assert begun["status"] == "queued"
        id = begun["id"]
        until(lambda: fetched(server, id)["output"], "something is written")
        assert fetched(server, id)["status"] == "in_progress"
        assert error_of(ask(server, previous_response_id=id))[:2] == (409, "conflict")
        for _ in range(2):
            cancelled = server.http.post(f"/v1/responses/{id}/cancel").json()
            assert cancelled["status"] == "cancelled"
            assert cancelled == fetched(server, id)
        server.wait_journal("cancelled")
        last = frames(server.http.get(f"/v1/responses/{id}?stream=true").text)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "cancelled")
        status, code, message = error_of(ask(server, previous_response_id=id))
        assert (status, code) == (400, "invalid_request")
        assert "is cancelled" in message
        other = made(server, HELD, background=True)["id"]
        until(lambda: fetched(server, other)["output"], "something is written")
        assert server.http.delete(f"/v1/responses/{other}").status_code == 200
        assert server.http.get(f"/v1/responses/{other}").status_code == 404
        server.wait_journal("cancelled", 2)
        plain = made(server)["id"]
        assert error_of(server.http.post(f"/v1/responses/{plain}/cancel"))[:2] == (400, "invalid_request")
        assert error_of(server.http.get(f"/v1/responses/{plain}?stream=true"))[:2] == (400, "unsupported")


def test_responses_in_the_background_that_fail_say_why(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        failed = over(server, made(server, 'x fake:{"fail_after": 1}', background=True)["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert "as told" in failed["error"]["message"]
        refused = over(server, made(server, 'x fake:{"refuse": "context_exceeded"}', background=True)["id"])
        assert refused["error"]["code"] == "context_length_exceeded"
        assert error_of(ask(server, previous_response_id=failed["id"]))[:2] == (400, "invalid_request")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_responses_in_the_background_have_failed_once_their_server_is_gone(
    tmp_path: Path, number: int
) -> None:
    with served(tmp_path, adopt_grace_s=0) as server:
        server.wait_state("ready")
        id = made(server, HELD, background=True)["id"]
        until(lambda: fetched(server, id)["output"], "something is written")
        server.process.send_signal(number)
        server.process.wait(DEADLINE_S)
    with served(tmp_path) as server:
        failed = fetched(server, id)
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        assert "ask again" in failed["error"]["message"]
        assert error_of(ask(server, "go on", previous_response_id=id))[:2] == (400, "invalid_request")
        assert server.http.post(f"/v1/responses/{id}/cancel").json()["status"] == "failed"


def test_responses_in_the_background_are_waited_for_by_a_restart_in_place(tmp_path: Path) -> None:
    with served(tmp_path, SLOW) as server:
        server.wait_state("ready")
        boot = server.http.get("/admin/restart").json()["boot"]
        id = made(server, "go on", background=True)["id"]
        assert server.http.post("/admin/restart").status_code in (200, 202)
        server.http.close()
        server.http = httpx2.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False)
        until(lambda: server.http.get("/admin/restart").json()["boot"] != boot, "another image")
        assert text_of(fetched(server, id)) == oracle(("user", "go on"), tokens=30)


def test_responses_are_made_where_nothing_may_be_stored(tmp_path: Path) -> None:
    with served(tmp_path, history_bytes=0) as server:
        whole = made(server)
        assert (whole["status"], whole["store"]) == ("completed", False)
        last = frames(ask(server, stream=True).text)[-1]
        assert (last["type"], last["response"]["store"]) == ("response.completed", False)
        status, code, message = error_of(ask(server, background=True))
        assert (status, code) == (400, "unsupported")
        assert "history_bytes" in message


@pytest.mark.parametrize("field", ["model", "keep_alive", "previous_response_id"])
def test_responses_do_not_say_again_what_is_megabytes_long(tmp_path: Path, field: str) -> None:
    with served(tmp_path) as server:
        status, _, message = error_of(ask(server, **{field: "x" * (1 << 20)}))
        assert status in (400, 404)
        assert "xxx" in message
        assert len(message) < 400


# ---------------------------------------------------------------- prompts


def test_responses_drop_the_oldest_turns_where_they_may(tmp_path: Path) -> None:
    with served(tmp_path, {"context": 40}) as server:
        turns = [{"role": "user", "content": f"say {number} " + "word " * 5} for number in range(20)]
        assert error_of(ask(server, turns))[:2] == (400, "context_length_exceeded")
        whole = made(server, turns, truncation="auto", instructions="Be brief.")
        kept = [("user", turn["content"]) for turn in turns]
        possible = [oracle(("system", "Be brief."), *kept[at:]) for at in range(1, 20)]
        assert text_of(whole) in possible
        assert whole["usage"]["input_tokens"] < 40
        listed = server.http.get(f"/v1/responses/{whole['id']}/input_items?limit=100").json()
        assert len(listed["data"]) == 20, "what is stored is what was sent"
        too_much = "word " * 60
        assert error_of(ask(server, too_much, truncation="auto"))[:2] == (400, "context_length_exceeded")


def test_responses_count_the_tokens_of_a_prompt(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        first = made(server, "one two")
        body = {"model": "fake", "input": "three", "previous_response_id": first["id"]}
        counted = server.http.post("/v1/responses/input_tokens", json=body).json()
        said = len(text_of(first).split())
        assert counted == {"object": "response.input_tokens", "input_tokens": 6 + said}
        assert error_of(server.http.post("/v1/responses/input_tokens", json={}))[:2] == (
            400,
            "invalid_request",
        )


def test_responses_take_what_codex_sends(tmp_path: Path) -> None:
    """A turn of an agent: its tools, its history without ids, thinking it cannot read, and no storing."""
    tools = [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False,
         "parameters": {"type": "object", "properties": {"command": {"type": "array"}}}},
        {"type": "custom", "name": "apply_patch", "description": "Edits.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}},
        {"type": "local_shell"}, {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__time__", "description": "Clocks.",
         "tools": [{"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": False}]},
    ]  # fmt: skip
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a b"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "c2", "name": "apply_patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "ok"},
        {"type": "local_shell_call", "call_id": "c3", "status": "completed", "action": {"type": "exec"}},
        {"type": "ghost_snapshot", "ghost_commit": {"id": "1"}},
        {"type": "function_call", "name": "now", "namespace": "mcp__time__", "arguments": "{}", "call_id": "c4"},
        {"type": "function_call_output", "call_id": "c4", "output": "noon"},
    ]  # fmt: skip
    calls = [
        ["shell", '{"command": ["pwd"]}'], ["apply_patch", '{"input": "*** Begin\\n"}'], ["mcp__time__now", "{}"]
    ]  # fmt: skip
    with served(tmp_path, {"tokens": 2, "reasoning": 1, "calls": calls}) as server:
        answer = ask(
            server, items, model="fake", instructions="You are.", tools=tools, tool_choice="auto",
            parallel_tool_calls=True, reasoning={"effort": "medium", "summary": "auto"}, store=False,
            stream=True, include=["reasoning.encrypted_content"], prompt_cache_key="k",
            text={"verbosity": "low"}, client_metadata={"a": "b"},
        )  # fmt: skip
        assert answer.headers["x-mlxd-ignored-tools"] == "local_shell,web_search"
        told = frames(answer.text)
        done = [frame["item"] for frame in told if frame["type"] == "response.output_item.done"]
        assert [item["type"] for item in done] == [
            "reasoning", "message", "function_call", "custom_tool_call", "function_call"
        ]  # fmt: skip
        assert done[0]["summary"]
        assert done[2]["arguments"] == calls[0][1]
        assert done[3]["input"] == "*** Begin\n"
        assert (done[4]["namespace"], done[4]["name"]) == ("mcp__time__", "now")
        assert done[0]["encrypted_content"]
        assert told[-1]["response"]["output"] == done
        assert set(told[-1]["response"]["usage"]) == {
            "input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details", "total_tokens"
        }  # fmt: skip
