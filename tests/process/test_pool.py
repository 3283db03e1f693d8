"""Many models in one real parent: swaps, loads, unloads, the ledger, replacements beside running ones."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shared import wire
from tests.fakes.worker import expected_text
from tests.process.harness import (
    Served,
    content,
    frames,
    served,
)

M = "org/fake-1b"
GB = 10**9
BIG = {"measured_bytes": 6 * GB}
ROOM_FOR_ONE = "10GB"
ROOM_FOR_TWO = "13GB"


def expected(text: str, count: int = 12) -> str:
    """What any fake model says to a chat of one message."""
    return expected_text(wire.ChatPrompt([{"role": "user", "content": text}]), 7, count)


def ask(server: Served, model: str, text: str = "hi") -> str:
    answer = server.ask(text, model=model)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["message"]["content"])


def test_swap_between_two_models_with_room_for_one(tmp_path: Path) -> None:
    with served(
        tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_ONE, linger_s=0, min_residency_s=0
    ) as server:
        for model in ("fake", "b", "fake", "b"):
            assert ask(server, model) == expected("hi")
        assert list(server.running()) == ["b"]
        ledger = server.ledger()
        assert ledger["held_bytes"] <= ledger["budget_bytes"]
        assert len(server.journal("spawned")) == len(server.journal("spawned", "b")) == 2


def test_pool_keeps_both_models_where_there_is_room(tmp_path: Path) -> None:
    with served(tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_TWO) as server:
        for model in ("fake", "b", "fake", "b"):
            ask(server, model)
        assert len(server.running()) == 2
        assert len(server.journal("spawned")) == len(server.journal("spawned", "b")) == 1


def test_pool_count_limit_is_held(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}, max_resident=1, linger_s=0, min_residency_s=0) as server:
        ask(server, "fake")
        ask(server, "b")
        assert list(server.running()) == ["b"]


def test_pool_a_stream_in_flight_is_never_evicted(tmp_path: Path) -> None:
    slow = BIG | {"tokens": 40, "ms_per_token": 25}
    with served(
        tmp_path, slow, {"b": BIG}, memory_budget_bytes=ROOM_FOR_ONE, linger_s=0, min_residency_s=0
    ) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            running = threads.submit(server.ask, "long", model="fake", stream=True)
            server.wait_journal("request")
            other = threads.submit(ask, server, "b")
            assert content(running.result().text) == expected("long", 40)
            assert other.result() == expected("hi")


def test_pool_a_resident_model_answers_while_another_loads(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"load_ms": 5000}}, load_wait_s=60) as server:
        server.wait_state("ready")
        with ThreadPoolExecutor() as threads:
            cold = threads.submit(ask, server, "b")
            server.wait_phase("b", "loading")
            for number in range(5):
                ask(server, "fake", f"q{number}")
            assert server.running()["b"]["phase"] == "loading"
            assert cold.result() == expected("hi")


def test_pool_one_load_for_many_requests(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {"load_ms": 500}}) as server:
        with ThreadPoolExecutor(12) as threads:
            texts = list(threads.map(lambda n: ask(server, "b", f"q{n}"), range(12)))
        assert texts == [expected(f"q{number}") for number in range(12)]
        assert len(server.journal("spawned", "b")) == 1


def test_pool_what_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"huge": {"measured_bytes": 99 * GB}}, memory_budget_bytes="10GB") as server:
        for stream in (False, True):
            answer = server.ask(model="huge", stream=stream)
            assert answer.status_code == 507
            message = answer.json()["error"]["message"]
            assert "huge needs 99" in message
            assert "memory_budget_bytes" in message
        for wait in (False, True):
            answer = server.http.post("/v1/models/huge/load", json={"wait": wait})
            assert answer.status_code == 507
            assert "huge needs 99" in answer.json()["error"]["message"]


def test_swap_news_reach_waiting_streams_as_comments(tmp_path: Path) -> None:
    slow = {"load_ms": 2500, "load_steps": 5}
    with served(tmp_path, {}, {"b": slow}, keepalive_s=0.1) as server:
        body = server.ask(model="b", stream=True).text
        news = [line for line in body.splitlines() if line.startswith(": place")]
        assert any("place 1 of 1 for b; loading, weights" in line for line in news)
        assert content(body) == expected("hi")


def test_pool_profiles_share_one_worker_and_names_are_told_truly(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.toml").write_text(
        '[models."b"]\naliases = ["small"]\n[models."b".profiles.brief]\nmax_tokens = 3\n'
    )
    with served(tmp_path, {}, {"b": {}}) as server:
        assert ask(server, "b") == expected("hi")
        assert ask(server, "small:brief") == expected("hi", 3)
        assert ask(server, "b:brief") == expected("hi", 3)
        assert len(server.journal("spawned", "b")) == 1
        assert server.ask(model="b:verbose").status_code == 404
        taken = server.http.patch("/admin/config", json={"models": {"b": {"aliases": [M]}}})
        assert (taken.status_code, taken.json()["error"]["param"]) == (400, "models.b.aliases")
        other_case = server.http.patch("/admin/config", json={"models": {"b": {"aliases": [M.upper()]}}})
        assert other_case.status_code == 400
        assert "the id of another model" in taken.json()["error"]["message"]
        assert ask(server, "small") == expected("hi")


def test_pool_a_fallback_is_opt_in_and_named(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}, fallback="resident") as server:
        server.wait_state("ready")
        answer = server.ask(model="gpt-4")
        assert answer.status_code == 200
        assert answer.headers["x-mlxd-fallback"] == "org/fake-1b"
        assert answer.json()["model"] == "org/fake-1b"
        streamed = server.ask(model="gpt-4", stream=True)
        assert streamed.headers["x-mlxd-fallback"] == "org/fake-1b"
        assert {frame["model"] for frame in frames(streamed.text)} == {"org/fake-1b"}


def test_ledger_eight_models_and_many_clients_on_a_budget_for_two(tmp_path: Path) -> None:
    models = {f"m{number}": BIG | {"tokens": 2} for number in range(7)}
    names = ["fake", *models]
    settings = {"burst_s": 0.2, "linger_s": 0.02, "min_residency_s": 0, "queue_limit": 200}
    with served(
        tmp_path, BIG | {"tokens": 2}, models, memory_budget_bytes=ROOM_FOR_TWO, **settings
    ) as server:
        peak = 0

        def one(number: int) -> str:
            nonlocal peak
            text = ask(server, names[number % 8], f"q{number}")
            peak = max(peak, server.ledger()["held_bytes"])
            return text

        with ThreadPoolExecutor(32) as threads:
            texts = list(threads.map(one, range(64)))
        assert texts == [expected(f"q{number}", 2) for number in range(64)]
        assert peak <= 13 * GB


def test_running_and_fit_show_the_arithmetic(tmp_path: Path) -> None:
    with served(tmp_path, BIG, memory_budget_bytes=ROOM_FOR_ONE) as server:
        server.wait_state("ready")
        row = server.running()["org/fake-1b"]
        ledger = server.ledger()
        [account] = ledger["accounts"].values()
        grant = account["grant"]
        assert grant["weights"] == 6 * GB
        assert row["phase"] == "ready"
        assert row["reserved_bytes"] == sum(grant.values())
        assert ledger["budget_bytes"] == 10 * GB == ledger["free_bytes"] + ledger["held_bytes"]
        fit = server.http.get("/admin/fit", params={"model": "fake", "context": 1000}).json()
        assert (fit["fits"], fit["weights_bytes"], fit["context_tokens"]) == (True, 6 * GB, 1000)
        assert server.http.get("/admin/fit?context=x").status_code == 400
        safe = [
            server.http.get("/admin/fit", params={"model": "fake", "context": context}).json()
            for context in (1, 1000, 100_000_000)
        ]
        assert {each["max_safe_context"] for each in safe} == {4096}  # whatever context is asked about
        assert [each["fits"] for each in safe] == [True, True, False]


def test_ledger_a_resident_model_gives_up_room_before_another_is_loaded(tmp_path: Path) -> None:
    with served(tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_TWO) as server:
        ask(server, "fake")
        before = server.running()["org/fake-1b"]["reserved_bytes"]
        ask(server, "b")
        assert server.running()["org/fake-1b"]["reserved_bytes"] < before
        assert server.wait_journal("resized")[0]["prefix"] < 1 << 30
        assert len(server.running()) == 2


@pytest.mark.parametrize(
    ("budget", "verdict"), [(64 * GB, "fully"), (7 * GB, "partly"), (5 * GB, "no")], ids=["64", "7", "5"]
)
def test_rows_of_models_say_whether_they_fit_as_admin_fit_does(
    tmp_path: Path, budget: int, verdict: str
) -> None:
    with served(tmp_path, BIG, memory_budget_bytes=budget) as server:
        [row] = server.http.get("/v1/models").json()["data"]
        fit = server.http.get("/admin/fit", params={"model": "fake"}).json()
        assert (row["fits"], row["support"]) == (verdict, "native")
        assert fit["fits"] is (verdict == "fully")
        assert (fit["never"] is not None) is (verdict == "no")
        for name in ("total_bytes", "loads_with_bytes", "usable_bytes"):
            assert row[name] == fit[name]


def test_fit_counts_with_the_limits_in_force(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.toml").write_text('[models."org/fake-1b"]\npin = true\n')
    with served(tmp_path, BIG, {"b": BIG}, max_resident=1, memory_budget_bytes="7GB") as server:
        fit = server.http.get("/admin/fit", params={"model": "b"}).json()
        assert fit["usable_bytes"] == 7 * GB
        assert "max_resident is 1" in fit["never"]
        assert fit["fits_beside"] is False


def test_ledger_a_worker_that_crashes_after_it_shrank_comes_back_as_small(tmp_path: Path) -> None:
    with served(tmp_path, BIG, {"b": BIG}, memory_budget_bytes=ROOM_FOR_TWO) as server:
        ask(server, "fake")
        ask(server, "b")
        server.wait_journal("resized")
        small = server.running()[M]["reserved_bytes"]
        os.kill(server.running()[M]["pid"], signal.SIGKILL)
        launched = server.wait_journal("spawned", 2)[-1]
        assert launched["prefix"] == server.journal("resized")[-1]["prefix"]
        assert server.running()[M]["reserved_bytes"] == small
