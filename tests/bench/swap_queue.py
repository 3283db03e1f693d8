"""Many requests and little memory: two clients that alternate, and many models that race."""

import json
import random
import threading
from pathlib import Path
from typing import Any

from tests.bench.pooled import FAKE, GB, Answer, Client, ask, logged, together, two_real
from tests.bench.verdict import How, Line, all_of, below
from tests.process.harness import Served, chat, served

SWAPS_BAR = 0.2
CLIENTS = 16
POLL_S = 0.02


# ---------------------------------------------------------------- alternate


def measure_alternate(model: Path, folder: Path, how: How) -> list[Line]:
    """With fakes (a load of 1.5 s, answers of 50 ms), then with the real model and answers of four tokens."""
    (folder / "fake").mkdir()
    (folder / "real").mkdir()
    count = 40 if how.quick else 100
    script = {"measured_bytes": 6 * GB, "load_ms": 1500, "tokens": 10, "ms_per_token": 5}
    with served(folder / "fake", script, {"b": script}, memory_budget_bytes="10GB") as server:
        lines = _alternate("fakes", server, (FAKE, "b"), count)
    with two_real(model, folder / "real") as server:
        return lines + _alternate("starter", server, ("one", "two"), count)


def _alternate(who: str, server: Served, models: tuple[str, str], count: int) -> list[Line]:
    """Each client asks one model, again as soon as it is answered. The first swaps make loads a known cost."""
    for model in (models[0], models[1], models[0]):
        ask(server.url, _short(model))
    before = len(server.errors())
    answered = together(lambda model: _client(server, model, count // 2), models)
    found = Found(server.errors()[before:])
    answers = [answer for each, _ in answered for answer in each]
    failures = [failure for _, failed in answered for failure in failed]
    longest = max(answer.first_s for answer in answers)
    bound, made_of = _bound(server, found)
    asked = len(answers) + len(failures)
    swaps = len(found.swaps)
    return [
        all_of("alternate", f"{who}: answered", len(answers), asked, notes=failures[0] if failures else ""),
        below("alternate", f"{who}: swaps a request", swaps / asked, SWAPS_BAR, notes=f"{swaps} swaps"),
        below("alternate", f"{who}: longest wait", longest, bound, " s"),
        Line("alternate", f"{who}: that bound", made_of),
    ]


class Found:
    """What a part of the server's log says: seconds of each swap, from the eviction of the one model to the other's
    being ready; of each load; and of each answer, from when its model was there.
    """

    def __init__(self, log: str) -> None:
        self.swaps: list[float] = []
        self.loads: list[float] = []
        self.answers: list[float] = [0.0]
        evicted = spawned = 0.0
        ready: dict[str, float] = {}
        for line in map(json.loads, log.splitlines()):
            at = line["ts"]
            match line["event"], line.get("state"):
                case "model.evicted", _:
                    evicted = at
                case "worker.state", "spawning":
                    spawned = at
                case "worker.state", "ready":
                    ready[line["model"]] = at
                    self.loads.append(at - spawned)
                    self.swaps.append(at - evicted)
                case "request.finished", _:
                    asked = at - line["seconds"]
                    self.answers.append(at - max(asked, ready.get(line["model"], 0.0)))


def _short(model: str) -> dict[str, Any]:
    tokens: dict[str, Any] = {} if model in (FAKE, "b") else {"max_tokens": 4}
    return chat("What is the capital of France?", model=model, temperature=0, **tokens)


def _client(server: Served, model: str, count: int) -> tuple[list[Answer], list[str]]:
    client = Client(server.url, key=model)
    answers: list[Answer] = []
    failures: list[str] = []
    for _ in range(count):
        try:
            answers.append(client.ask(_short(model)))
        except Exception as error:  # whatever it is, it is a request that was not answered
            failures.append(f"{type(error).__name__}: {error}")
            client.close()
    client.close()
    return answers, failures


def _bound(server: Served, found: Found) -> tuple[float, str]:
    """By the settings in force and the longest of this run: a client whose model has just given way waits for the
    other to be loaded, for the other's whole turn, and for its own model to come back.
    """
    values = server.http.get("/admin/config").json()["values"]
    burst_s = max(values["burst_s"], 2 * 2 * max(found.loads))
    answer_s, swap_s = max(found.answers), max(found.swaps)
    made_of = f"burst {burst_s:.1f} (burst_s, at least twice both loads) + longest answer {answer_s:.2f}"
    return burst_s + answer_s + 2 * swap_s, f"{made_of} + 2 swaps of {swap_s:.2f} s"


# ---------------------------------------------------------------- race


def measure_race(model: Path, folder: Path, how: How) -> list[Line]:
    """Fakes of 6 GB each on 13 GB; every client asks for models at random, again as soon as it is answered."""
    script = {"measured_bytes": 6 * GB, "tokens": 8, "ms_per_token": 5}
    names = [FAKE, *(f"m{number}" for number in range(7))]
    each = 3 if how.quick else 20
    with served(
        folder, script, dict.fromkeys(names[1:], script), memory_budget_bytes="13GB", load_wait_s=600
    ) as server:
        watch = LedgerWatch(server)
        try:
            done = together(lambda number: _racer(server, names, number, each), range(CLIENTS))
        finally:
            watch.end()
        loads = logged(server, "model.load")
    failures = [failure for _, failed, _ in done for failure in failed]
    answered = sum(count for count, _, _ in done)
    free = min(load["free"] for load in loads)
    return [
        all_of("race", "answered", answered, CLIENTS * each, notes=failures[0] if failures else ""),
        all_of(
            "race",
            "looks at the ledger that found it within the budget",
            watch.looks - watch.over,
            watch.looks,
            notes=f"at most {watch.peak / GB:.2f} of {watch.budget / GB:.0f} GB",
        ),
        Line(
            "race",
            "least free after a reservation, by the log",
            f"{free / GB:.2f} GB ({len(loads)} loads)",
            ">= 0",
            free >= 0,
        ),
        Line("race", "longest wait", f"{max(longest for _, _, longest in done):.1f} s"),
    ]


def _racer(server: Served, names: list[str], number: int, count: int) -> tuple[int, list[str], float]:
    choose = random.Random(number)
    client = Client(server.url, key=f"client {number}")
    answered, failures, longest = 0, [], 0.0
    for _ in range(count):
        try:
            answer = client.ask(chat(f"q {number}", model=choose.choice(names)))
            answered += 1
            longest = max(longest, answer.first_s)
        except Exception as error:  # whatever it is, it is a request that was not answered
            failures.append(f"{type(error).__name__}: {error}")
            client.close()
    client.close()
    return answered, failures, longest


class LedgerWatch(threading.Thread):
    """Asks for the ledger all along, on a connection of its own."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self.looks = self.over = self.peak = self.budget = 0
        self._server = server
        self._enough = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._enough.wait(POLL_S):
            ledger = self._server.ledger()
            held, self.budget = ledger["held_bytes"], ledger["budget_bytes"]
            self.looks += 1
            self.over += held > self.budget
            self.peak = max(self.peak, held)

    def end(self) -> None:
        self._enough.set()
        self.join()
