"""Answers beside a training: `python -m tests.bench.beside [--quick]`.

The starter is served, and fine-tuned at the same time. What is measured is the time to the first token of short chats
that come at random moments of a step, beside that of the same server before the training. The bar is twice that and one
step: a job waits between two steps while requests are answered, so a chat waits for the rest of one. The exit code is 1
when it is missed. Compare only numbers of one run.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.serve import ROOT, machine, starter
from tests.bench.verdict import Line, below, table
from tests.e2e.real import serving
from tests.process.harness import Served, chat
from tests.train.lab import chats, write_data

PATIENCE_S = 600.0
QUIET_S = 1.0
WORDS = ("storm", "harbour", "letter", "whale", "bell", "map", "anchor", "gull", "lamp", "rope")


def main() -> int:
    """Print the table and one JSON line. 1 = the bar was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer chats, for a look")
    options = parser.parse_args()
    model = starter(ROOT / ".data").resolve()
    with tempfile.TemporaryDirectory(prefix="mlxd-bench-") as folder:
        lines = _measure(model, Path(folder), 3 if options.quick else 9)
    print(f"{machine()}; model {model.name}{'; quick' if options.quick else ''}\n")
    print(table(lines))
    print(json.dumps([line._asdict() | {"verdict": line.verdict} for line in lines]))
    return int(any(line.is_held is False for line in lines))


def _measure(model: Path, folder: Path, count: int) -> list[Line]:
    write_data(folder / "data" / "datasets" / "mine", chats(16, longest=70))
    with serving(model, folder, "--jobs-quiet", str(QUIET_S)) as server:
        name = str(server.wait_state("ready")["model"]["id"])
        _first_token_s(server, name, 0)
        alone = [_first_token_s(server, name, number) for number in range(count)]
        body = {"model": name, "data": "mine", "iters": 1000, "steps_per_report": 1, "batch_size": 2}
        job = server.http.post("/api/finetune/submit", json=body).raise_for_status().json()["job_id"]
        _steps(server, job, 2)
        draw = random.Random(1)
        beside = []
        for number in range(count):
            _steps(server, job, 2)  # the first may be one that was under way when the last chat came
            time.sleep(draw.uniform(0, 1) * _step_s(server, job))
            beside.append(_first_token_s(server, name, count + number))
        step = _step_s(server, job)
        done = len(_metrics(server, job))
        server.http.post(f"/api/jobs/{job}/cancel").raise_for_status()
    bar = 2 * statistics.median(alone) + step
    notes = f"median {statistics.median(beside):.2f} s of {count}; alone {statistics.median(alone):.2f} s"
    return [
        Line("beside", "one training step, median", f"{step:.2f} s"),
        below(
            "beside", "longest time to a first token during a training", max(beside), bar, " s", notes=notes
        ),
        Line("beside", "steps of the training meanwhile", str(done)),
    ]


def _first_token_s(server: Served, model: str, number: int) -> float:
    """Of a chat whose prompt no other one begins like."""
    text = f"{number} {WORDS[number % 10]}: tell me about it."
    began = time.perf_counter()
    body = chat(text, model=model, max_tokens=4, stream=True)
    with server.http.stream("POST", "/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.perf_counter() - began
    raise AssertionError("an answer without text")


def _metrics(server: Served, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.http.get(f"/api/jobs/{job}/metrics?limit=1000").json()["metrics"]
    return [each for each in found if each["kind"] == "train"]


def _steps(server: Served, job: str, more: int) -> None:
    """Wait for so many steps from now on."""
    after = server.http.get(f"/api/jobs/{job}/log?after=0&limit=1000").json()["next"]
    path = f"/api/jobs/{job}/stream?after={after}"
    with server.http.stream("GET", path, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            assert line != "event: end", f"{job} is over"
            more -= line == "event: metric"
            if not more:
                return
    raise AssertionError("the stream of the job broke off")


def _step_s(server: Served, job: str) -> float:
    """The median of what its steps took, those in which it waited left out: they are the longest."""
    times = sorted(1 / each["steps_per_s"] for each in _metrics(server, job))
    return times[len(times) // 2] if len(times) < 4 else statistics.median(times[: max(2, len(times) // 2)])


if __name__ == "__main__":
    sys.exit(main())
