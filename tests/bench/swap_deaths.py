"""kill -9 of the worker at random moments under many streams, again and again; every text has to be the right one."""

import random
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from tests.bench.pooled import FAKE, QUIET, ask, logged, together
from tests.bench.verdict import How, Line, all_of
from tests.e2e.real import serving
from tests.process.harness import Served, served, until

STREAMS = 16
PATIENCE_S = 180.0
MODEL_DEATHS = 100_000  # the restart budget: it is not what is measured here
TOPICS = ("the sea", "a fox", "the moon", "an old train", "bread", "a lost key", "snow", "the lighthouse")


def measure_kill(model: Path, folder: Path, how: How) -> list[Line]:
    """The starter, then fakes at a higher rate and with all streams in the worker."""
    kills = 5 if how.quick else 50
    (folder / "real").mkdir()
    (folder / "fake").mkdir()
    flags = (*QUIET, "--max-rows", str(how.rows), "--restart-budget", str(MODEL_DEATHS))
    with serving(model, folder / "real", *flags) as server:
        name = str(server.wait_state("ready")["model"]["id"])
        who = f"starter with {how.rows} rows"
        lines = Deaths(who, server, name, _requests(24), spread_s=0.4).run(kills)
    script = {"tokens": 60, "ms_per_token": 20, "lockstep": True}
    with served(folder / "fake", script, max_rows=STREAMS, restart_budget=MODEL_DEATHS) as server:
        server.wait_state("ready")
        who = f"fakes with {STREAMS} rows"
        return lines + Deaths(who, server, FAKE, _requests(60), spread_s=0.3).run(kills)


def _requests(tokens: int) -> list[dict[str, Any]]:
    """Texts and some chats, every other one sampled, no two alike; short, for each loss reads the prompt again."""
    found: list[dict[str, Any]] = []
    for number in range(STREAMS):
        topic = f"{TOPICS[number // 2]} {number}"
        body: dict[str, Any] = {"prompt": f"A story of {topic}:"}
        if number % 4 == number // 4 % 2:  # of both kinds
            system = {"role": "system", "content": "Tell stories."}
            body = {"messages": [system, {"role": "user", "content": f"About {topic}"}]}
        temperature = 0.8 if number % 2 else 0.0
        found.append(body | {"max_tokens": tokens, "temperature": temperature, "seed": 100 + number})
    return found


class Stream(threading.Thread):
    """One client: asks the same again and again, each time under an id of its own, and compares."""

    def __init__(self, url: str, body: dict[str, Any], enough: threading.Event) -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.enough = url, body, enough
        self.expected = ""
        self.request = ""  # the id of the answer that runs; "" = none
        self.heard = 0.0  # when the last piece of text came
        self.texts: list[str] = []
        self.failures: list[str] = []

    def run(self) -> None:
        while not self.enough.is_set():
            self.request = uuid.uuid4().hex
            try:
                self.texts.append(ask(self.url, self.body, self._hear, request=self.request).text)
            except Exception as error:  # whatever it is, it is a stream that did not complete
                self.failures.append(f"{type(error).__name__}: {error}")
            self.request = ""

    def _hear(self) -> None:
        self.heard = time.monotonic()


class Deaths:
    """One server, its streams, and who kills. A stream may lose its worker again only after something new of it has
    come: a second loss without that is, by the rules, the request's own fault. So each kill waits for that, and then
    for a random time.
    """

    def __init__(
        self, who: str, server: Served, model: str, requests: list[dict[str, Any]], *, spread_s: float
    ) -> None:
        self.who, self.server, self.model, self.spread_s = who, server, model, spread_s
        self.enough = threading.Event()
        self.streams = [Stream(server.url, body | {"model": model}, self.enough) for body in requests]
        self.lost: set[str] = set()  # requests that have lost a worker, by the log
        self.ready_at = 0.0
        self.random = random.Random(1)

    def run(self, kills: int) -> list[Line]:
        self._take_expected()
        began = time.monotonic()
        for stream in self.streams:
            stream.start()
        try:
            until(self._all_run, "all streams at a time", PATIENCE_S)
            for _ in range(kills):
                until(self._all_got_further, "new text of every stream after the last kill", PATIENCE_S)
                time.sleep(self.random.uniform(0.0, self.spread_s))
                self._kill()
        finally:
            self.enough.set()
        for stream in self.streams:
            stream.join(PATIENCE_S)
        assert not any(stream.is_alive() for stream in self.streams), "a stream that does not end"
        return self._lines(kills, time.monotonic() - began)

    def _take_expected(self) -> None:
        """The uninterrupted run, all at a time as later on."""

        def take(stream: Stream) -> None:
            stream.expected = ask(stream.url, stream.body).text

        together(take, self.streams)
        assert all(stream.expected for stream in self.streams), "the uninterrupted run is not complete"

    def _all_run(self) -> bool:
        row = self.server.running()[self.model]
        return bool(row["running"] + row["waiting"] == len(self.streams))

    def _all_got_further(self) -> bool:
        return all(stream.heard > self.ready_at for stream in self.streams if stream.request in self.lost)

    def _kill(self) -> None:
        victim = self.server.kill_worker()

        def is_back() -> bool:
            time.sleep(0.05)  # the next worker needs the cores
            engine = self.server.engine()
            if (
                engine["state"] == "backoff"
            ):  # after early deaths it would wait longer and longer: not our matter
                self.server.http.post(f"/admin/workers/{self.model}/restart").raise_for_status()
            return bool(engine["state"] == "ready" and engine["pid"] != victim)

        until(is_back, "the next worker", PATIENCE_S)
        self.ready_at = time.monotonic()
        self.lost = {event["request"] for event in logged(self.server, "request.lost_worker")}

    def _lines(self, kills: int, took_s: float) -> list[Line]:
        failures = [failure for stream in self.streams for failure in stream.failures]
        pairs = [(text, stream.expected) for stream in self.streams for text in stream.texts]
        same = sum(text == expected for text, expected in pairs)
        lost = logged(self.server, "request.lost_worker")
        resumed = sum(event["tokens"] > 0 for event in lost)
        notes = (
            f"{resumed} losses in mid-stream, {len(lost) - resumed} before the first token, {took_s:.0f} s"
        )
        return [
            all_of(
                "kill",
                f"{self.who}, {kills} kills under {len(self.streams)} streams: complete",
                len(pairs),
                len(pairs) + len(failures),
                notes=failures[0][:120] if failures else notes,
            ),
            all_of("kill", f"{self.who}: text of the undisturbed run", same, len(pairs)),
        ]
