"""Crash: real workers, really killed. What a client sees, and how the worker comes back."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from shared import wire
from tests.fakes.worker import expected_text
from tests.process.harness import DEADLINE_S, chat, content, frames, is_running, served, until


def oracle(text: str, tokens: int) -> str:
    """The answer of an uninterrupted run to `chat(text)`."""
    return expected_text(wire.ChatPrompt([{"role": "user", "content": text}]), 7, tokens)


def test_a_crash_before_the_first_event_is_replayed_and_every_queued_request_is_answered(
    tmp_path: Path,
) -> None:
    with served(tmp_path, {"crash_after": 0, "prefill_ms": 200}) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor(20) as threads:
            answers = list(threads.map(lambda n: server.ask(f"q {n}"), range(20)))
        assert [answer.status_code for answer in answers] == [200] * 20
        texts = [answer.json()["choices"][0]["message"]["content"] for answer in answers]
        assert texts == [oracle(f"q {n}", 12) for n in range(20)]
        engine = server.engine()
        assert engine["epoch"] == 2
        assert engine["restarts"] == 1
        assert engine["last_exit"]["signal"] == "SIGKILL"
        assert "fake worker crashes as told" in engine["last_exit"]["stderr"]


@pytest.mark.parametrize("after", [1, 5, 11])
@pytest.mark.parametrize("tokens_per_event", [1, 3])
def test_a_stream_cut_by_a_crash_goes_on_as_if_nothing_had_been(
    tmp_path: Path, after: int, tokens_per_event: int
) -> None:
    script = {"tokens": 40, "crash_after": after, "tokens_per_event": tokens_per_event, "ms_per_token": 2}
    with served(tmp_path, script) as server:
        body = server.ask("go on", stream=True).text
        assert content(body) == oracle("go on", 40)
        assert body.endswith("data: [DONE]\n\n")
        assert "error" not in body
        assert frames(body)[-1]["usage"]["completion_tokens"] == 40
        assert sum("role" in frame["choices"][0]["delta"] for frame in frames(body)) == 1
        resumed = server.wait_journal("request", 2)[1]
        assert resumed["resume"] == after * tokens_per_event


def test_a_killed_worker_is_survived_by_a_request_that_is_not_streamed(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 30, "crash_after": 10, "ms_per_token": 2}) as server:
        answer = server.ask("whole").json()
        assert answer["choices"][0]["message"]["content"] == oracle("whole", 30)


def test_a_long_answer_outlives_any_number_of_crashes_between_which_it_goes_on(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 30, "crash_after": 5, "crash_times": 3}) as server:
        body = server.ask("long", stream=True).text
        assert content(body) == oracle("long", 30)
        assert server.engine()["epoch"] == 4
        assert server.ask("long").status_code == 200


def test_a_request_that_only_waits_in_line_is_not_charged_with_crashes(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(server.ask, 'w fake:{"queue_ms":700}', stream=True)
            for count in (1, 2):
                server.wait_journal("request", count)
                server.kill_worker()
            answer = waiting.result()
        assert content(answer.text) == oracle('w fake:{"queue_ms":700}', 12)
        assert server.ask("w").status_code == 200


def test_one_crash_under_equal_requests_is_one_death_and_quarantines_none(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 12, "crash_at": 2, "ms_per_token": 60, "lockstep": True}) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(server.ask, "same", stream=True) for _ in range(3)]
            until(lambda: server.errors().count("request.lost_worker") == 3 or None, "three losses")
            fourth = server.ask("same", stream=True)
        assert [content(answer.text) for answer in [fourth, *(each.result() for each in asked)]] == [
            oracle("same", 12)
        ] * 4


def test_a_second_crash_ends_a_stream_with_one_error_frame_and_quarantines_the_request(
    tmp_path: Path,
) -> None:
    with served(tmp_path, {"tokens": 30, "crash_at": 3, "crash_times": 2}) as server:
        body = server.ask("poison", stream=True).text
        assert content(body) == oracle("poison", 3)
        error = frames(body)[-1]["error"]
        assert error["type"] == "engine_unavailable"
        assert "died twice" in error["message"]
        assert "[DONE]" not in body
        again = server.ask("poison", stream=True)
        assert again.status_code == 500
        assert again.json()["error"]["code"] == "quarantined"
        [held] = server.http.get("/admin/quarantine").json()["requests"]
        assert (held["model"], held["deaths"]) == ("org/fake-1b", 2)
        assert held["hash"] in again.json()["error"]["message"]
        assert server.http.delete(f"/admin/quarantine/{held['hash']}").status_code == 200
        assert server.http.delete(f"/admin/quarantine/{held['hash']}").status_code == 404
        assert server.http.delete("/admin/quarantine/nonsense").status_code == 404
        assert server.http.get("/admin/quarantine").json()["requests"] == []
        assert again.headers["x-should-retry"] == "false"
        server.wait_state("ready")
        assert server.ask("harmless").status_code == 200


def test_health_answers_throughout_a_crash(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 300}) as server:
        server.wait_state("ready")
        seen: list[tuple[int, str]] = []
        stop = threading.Event()

        def watch() -> None:
            with httpx2.Client(base_url=server.url, timeout=DEADLINE_S, trust_env=False) as client:
                while not stop.is_set():
                    answer = client.get("/health")
                    seen.append((answer.status_code, answer.json()["engine"]))

        watcher = threading.Thread(target=watch)
        watcher.start()
        server.kill_worker()
        until(
            lambda: server.engine()["epoch"] == 2 and server.engine()["state"] == "ready", "a second worker"
        )
        stop.set()
        watcher.join()
        assert {status for status, _ in seen} == {200}
        assert "loading" in {engine for _, engine in seen}
        assert server.ask().status_code == 200


def test_a_crash_of_an_idle_worker_is_repaired_without_any_request(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        server.wait_state("ready")
        killed = server.kill_worker()
        engine = until(
            lambda: now if (now := server.engine())["state"] == "ready" and now["epoch"] == 2 else None,
            "the next worker",
        )
        assert engine["pid"] != killed
        assert engine["last_exit"]["reason"] == "the worker was killed by SIGKILL"


def test_crashes_beyond_the_budget_exhaust_it_until_an_operator_restarts(tmp_path: Path) -> None:
    with served(tmp_path, {"crash_at_load": 2}, restart_budget=1) as server:
        engine = server.wait_state("exhausted")
        assert engine["restarts"] == 1
        refused = server.ask()
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "was killed by SIGKILL" in refused.json()["error"]["message"]
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()["state"]) == (503, "exhausted")
        assert server.http.post("/admin/workers/org/fake-1b/restart").status_code == 202
        server.wait_state("ready")
        assert server.ask().status_code == 200


def test_an_exhausted_crash_budget_is_tried_again_when_half_open_and_somebody_asks(tmp_path: Path) -> None:
    with served(tmp_path, {"crash_at_load": 1}, restart_budget=0, half_open_s=0.2) as server:
        server.wait_state("exhausted")
        assert until(lambda: answer if (answer := server.ask()).status_code == 200 else None, "half-open")
        assert server.engine()["epoch"] == 2


@pytest.mark.parametrize(
    ("script", "reason", "status"),
    [
        ({"fatal": "bad_checkpoint", "fatal_message": "model.safetensors is cut short"}, "is cut short", 503),
        ({"fatal": "unsupported", "fatal_message": "family 'mamba' is not here"}, "family 'mamba'", 503),
        ({"fatal": "internal", "exit_code": 4}, "config.json has no model_type", 507),
    ],
)
def test_a_permanent_fault_is_no_crash_to_restart_after_and_is_told_at_once(
    tmp_path: Path, script: dict[str, object], reason: str, status: int
) -> None:
    with served(tmp_path, script) as server:
        engine = server.wait_state("failed")
        assert engine["epoch"] == 1
        answer = server.ask()
        assert answer.status_code == status
        assert reason in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"


def test_requests_that_wait_for_a_load_that_fails_are_answered_with_the_reason(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 500, "fatal": "bad_checkpoint"}) as server:
        with ThreadPoolExecutor(5) as threads:
            answers = list(threads.map(lambda n: server.ask(f"q {n}"), range(5)))
        assert {answer.status_code for answer in answers} == {503}
        assert all("no model_type" in answer.json()["error"]["message"] for answer in answers)


def test_a_worker_of_another_wire_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLXD_FAKE", '{"wire": 99}')
    with served(tmp_path) as server:
        assert "wire 99" in server.wait_state("failed")["reason"]


def test_a_worker_that_says_no_hello_is_ended_like_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXD_FAKE", '{"no_hello": true}')
    with served(tmp_path, hello_s=1.5, restart_budget=0, stop_grace_s=0.3) as server:
        assert "did not say hello" in server.wait_state("exhausted")["last_exit"]["reason"]


def test_a_stalled_load_is_ended_like_a_crash(tmp_path: Path) -> None:
    with served(tmp_path, {"silent_load": True}, load_stall_s=0.5, restart_budget=0) as server:
        assert "loading stalled" in server.wait_state("exhausted")["last_exit"]["reason"]


def test_a_hung_worker_is_detected_killed_and_its_stream_resumed_like_after_a_crash(tmp_path: Path) -> None:
    script = {"tokens": 20, "freeze_after": 6, "ms_per_token": 1, "ignore_term": True}
    with served(tmp_path, script, heartbeat_s=1.0, stop_grace_s=0.3) as server:
        body = server.ask("hang", stream=True).text
        assert content(body) == oracle("hang", 20)
        engine = server.engine()
        assert "no heartbeat" in engine["last_exit"]["reason"]
        assert engine["last_exit"]["signal"] == "SIGKILL"


def test_a_worker_crash_loop_ends_open_requests_when_the_budget_is_spent(tmp_path: Path) -> None:
    with served(tmp_path, {"crash_at_load": 99}, restart_budget=2) as server:
        answer = server.ask()
        assert answer.status_code == 503
        assert server.engine()["restarts"] == 2


def test_events_tell_of_a_crash_and_of_the_return(tmp_path: Path) -> None:
    with served(tmp_path, {"load_ms": 200}) as server:
        server.wait_state("ready")
        with server.http.stream("GET", "/admin/events") as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("id: ")
            assert next(lines) == "event: snapshot"
            server.kill_worker()
            states = []
            for line in lines:
                if line.startswith("data: ") and '"state"' in line:  # others tell of the queue
                    states.append(httpx2.Response(200, text=line[6:]).json()["state"])
                if states[-1:] == ["ready"] and "loading" in states:
                    break
        assert [
            state
            for state in dict.fromkeys(states[states.index("reclaiming") :])
            if state not in ("backoff", "stopping")
        ] == ["reclaiming", "spawning", "loading", "ready"]


def test_a_cut_connection_without_a_crash_resumes_on_the_same_worker(tmp_path: Path) -> None:
    with served(tmp_path, {"tokens": 20, "cut_after": 4, "ms_per_token": 1}) as server:
        assert content(server.ask("cut", stream=True).text) == oracle("cut", 20)
        assert server.engine()["epoch"] == 1


def test_no_worker_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    with served(tmp_path, {"ms_per_token": 50, "tokens": 1000}, adopt_grace_s=0.2) as server:
        worker = server.wait_state("ready")["pid"]
        with server.http.stream("POST", "/v1/chat/completions", json=chat("x", stream=True)) as stream:
            next(stream.iter_bytes())
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(DEADLINE_S)
        until(lambda: not is_running(worker), "the worker to leave")
        assert server.journal("parent gone")


def test_crash_of_a_poison_request_costs_no_other_request_its_answer(tmp_path: Path) -> None:
    """Who was there when a worker died is tried alone, so the second death shows whose fault it is."""
    with served(tmp_path, {"tokens": 60, "ms_per_token": 20}, restart_budget=9) as server:
        server.wait_state("ready")
        poison = 'poison fake:{"crash_at": 0, "crash_times": 99}'
        with ThreadPoolExecutor() as threads:
            before = [threads.submit(server.ask, f"before {n}", stream=True) for n in range(3)]
            server.wait_journal("request", 3)
            guilty = threads.submit(server.ask, poison, stream=True)
            after = [threads.submit(server.ask, f"after {n}", stream=True) for n in range(3)]
            assert frames(guilty.result().text)[-1]["error"]["type"] == "engine_unavailable"
            for number in range(3):
                assert content(before[number].result().text) == oracle(f"before {number}", 60)
                assert content(after[number].result().text) == oracle(f"after {number}", 60)
        assert len(server.http.get("/admin/quarantine").json()["requests"]) == 1
