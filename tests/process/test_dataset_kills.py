"""A data set's job whose process is killed with -9 at its requests, again and again: it ends as if undisturbed."""

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shared.lab import Dataset
from tests.fakes.answers import Answers
from tests.process.harness import ROOT

SCRIPT = """
import sys
from pathlib import Path
import msgspec
from shared.lab import Dataset
from worker.jobs import dataset
from worker.jobs.context import JobContext
spec = msgspec.json.decode(sys.argv[1], type=Dataset)
print(flush=True)
dataset.run(spec, JobContext(lambda event: None, lambda: False, Path(sys.argv[2]), Path(sys.argv[3])))
"""
UNITS = 24


def spec_of(url: str) -> Dataset:
    seeds = "\n".join(f"Hello number {number}" for number in range(UNITS))
    return Dataset(template="multi_turn_chat", inputs={"seeds": seeds, "turns": 4}, url=url, streams=3)


def answer(messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
    return f"{body['seed']} to {messages[-1]['content'][-40:]}"


@contextlib.contextmanager
def job(url: str, output: Path, work: Path) -> Any:
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        msgspec.json.encode(spec_of(url)).decode(),
        str(output),
        str(work),
    ]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_dataset_that_is_killed_time_and_again_ends_the_same(tmp_path: Path, seed: int) -> None:
    made = random.Random(seed)
    victim: list[subprocess.Popen[bytes]] = []
    deaths: list[int] = []
    left = 0

    def disturbed(messages: list[dict[str, Any]], body: dict[str, Any]) -> str:
        nonlocal left
        left -= 1
        if left == 0 and victim:
            os.kill(victim[0].pid, signal.SIGKILL)
            deaths.append(victim[0].pid)
        return answer(messages, body)

    with Answers(answer) as server:
        whole, mine, work = tmp_path / "sets" / "whole", tmp_path / "sets" / "mine", tmp_path / "jobs" / "a"
        with job(server.url, whole, tmp_path / "jobs" / "whole") as process:
            assert process.wait(120) == 0
        asked = len(server.asked)
        server.reply = disturbed
        for _ in range(60):
            left = made.randint(5, 25)
            with job(server.url, mine, work) as process:
                victim[:] = [process]
                code = process.wait(120)
                victim.clear()
            assert code in (0, -signal.SIGKILL)
            assert mine.exists() == (code == 0)
            if code == 0:
                break
        else:
            raise AssertionError("it never came to its end")
        again = len(server.asked) - asked
    assert len(deaths) >= 2
    assert asked <= again <= asked + len(deaths) * 3 * 3  # at most what each stream was at is asked again
    for name in ("train.jsonl", "valid.jsonl"):
        assert (whole / name).read_bytes() == (mine / name).read_bytes()
    assert sorted(path.name for path in mine.parent.iterdir()) == ["mine", "whole"]
