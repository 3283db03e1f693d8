"""The parent is killed and started again, or becomes the next one in place: workers are adopted, nothing is lost."""

import contextlib
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil

from tests.bench.pooled import QUIET, ask, logged
from tests.bench.verdict import How, Line, all_of, below
from tests.e2e.real import serving
from tests.process.harness import DEADLINE_S, Served, chat, until

BAR_S = 2.0
IN_FLIGHT = 8


def measure_adopt(model: Path, folder: Path, how: How) -> list[Line]:
    """Each parent is killed with a ready, idle worker; the last one restarts in place under load."""
    times: list[float] = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(model, folder, *QUIET))
        worker = int(server.wait_state("ready")["pid"])
        stack.callback(_end, psutil.Process(worker))  # where a parent dies and the next does not come up
        ask(server.url, _question())
        for _ in range(2 if how.quick else 5):
            server.process.kill()
            server.process.wait(DEADLINE_S)
            began = time.perf_counter()
            server = stack.enter_context(serving(model, folder, *QUIET))
            ask(server.url, _question())
            times.append(time.perf_counter() - began)
            assert server.engine()["pid"] == worker, f"worker {worker} was not adopted"
        loads = len(logged(server, "model.load"))
        lines = [
            below(
                "adopt",
                "parent killed: start of the next to its first token",
                statistics.median(times),
                BAR_S,
                " s",
                notes=f"worst of {len(times)}: {max(times):.2f}",
            ),
            Line("adopt", "loads, all parents together", str(loads), "1", loads == 1),
        ]
        return lines + _restart(server, worker)


def _end(worker: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):
        worker.kill()


def _question(**fields: Any) -> dict[str, Any]:
    return chat("What is the capital of France?", temperature=0, **({"max_tokens": 2} | fields))


def _restart(server: Served, worker: int) -> list[Line]:
    """`POST /admin/restart` with answers in flight, and requests that come while nobody accepts."""
    body = _question(max_tokens=24)
    expected = ask(server.url, body).text
    boot = _status(server)["boot"]

    def answered(_: int) -> str:
        try:
            return ask(server.url, body).text
        except Exception as error:  # whatever it is, it is a request that was not answered
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(2 * IN_FLIGHT) as threads:
        running = [threads.submit(answered, number) for number in range(IN_FLIGHT)]
        until(lambda: server.engine()["in_flight"] == IN_FLIGHT, "all in flight")
        began = time.perf_counter()
        httpx2.post(f"{server.url}/admin/restart", timeout=DEADLINE_S, trust_env=False).raise_for_status()
        meanwhile = [threads.submit(answered, number) for number in range(IN_FLIGHT)]
        until(lambda: _status(server)["boot"] != boot, "the next image", 90.0)
        took = time.perf_counter() - began
        texts = [each.result() for each in (*running, *meanwhile)]
    same = sum(text == expected for text in texts)
    wrong = next((text for text in texts if text != expected), "")
    pid = server.engine()["pid"]
    return [
        all_of(
            "adopt",
            f"restart under {IN_FLIGHT} streams and {IN_FLIGHT} newcomers: answered rightly",
            same,
            len(texts),
            notes=wrong[:120] or f"{took:.1f} s with the answers in flight",
        ),
        Line(
            "adopt",
            "worker after the restart",
            "the same" if pid == worker else str(pid),
            "the same",
            pid == worker,
        ),
    ]


def _status(server: Served) -> dict[str, Any]:
    """Over a connection of its own: the restart closes the others."""
    found: dict[str, Any] = httpx2.get(
        f"{server.url}/admin/restart", timeout=DEADLINE_S, trust_env=False
    ).json()
    return found
