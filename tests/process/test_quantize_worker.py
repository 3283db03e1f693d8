"""Quantizing in a worker process: its events reach whoever waits, and ending it leaves nothing behind."""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from parent.jobs.run import run_job
from shared.checkpoint import inspect
from shared.errors import ErrorCode, Refused
from shared.jobs import JobDone, JobEvent, JobStage, JobStarted
from shared.lab import Quantize
from tests.oracles.checkpoints import write_case
from tests.worker.quantize.lab import contents

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from pathlib import Path
import msgspec
from shared.lab import Quantize
from tests.worker.quantize.lab import run_job
spec = msgspec.json.decode(sys.argv[1], type=Quantize)
told = lambda event: print(type(event).__name__, flush=True)
run_job(spec, Path(sys.argv[2]), work=Path(sys.argv[3]), on_event=told, shard_bytes=40_000)
"""


def test_quantize_in_a_process_of_its_own(tmp_path: Path) -> None:
    spec = Quantize(model=str(write_case("llama_tied", tmp_path / "model")), bits=4, group_size=32)
    events: list[JobEvent] = []
    done = asyncio.run(run_job(spec, tmp_path / "models" / "small", on_event=events.append))
    assert done == events[-1] == JobDone(str(tmp_path / "models" / "small"), done.summary)
    assert isinstance(events[0], JobStarted)
    assert "bits a weight, KL 0." in done.summary
    assert inspect(Path(done.output)).quantization == "affine 4-bit group 32"
    with pytest.raises(Refused, match="exists; choose another name") as refused:
        asyncio.run(run_job(spec, tmp_path / "models" / "small"))
    assert refused.value.failure.code is ErrorCode.CONFLICT


def test_quantize_that_is_ended_leaves_nothing(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    spec = Quantize(model=str(model), group_size=32, target_bpw=6.5, num_calibration=1, calibration_tokens=16)

    async def until_it_measures() -> None:
        reached = asyncio.Event()

        def seen(event: JobEvent) -> None:
            if isinstance(event, JobStage) and event.stage == "sensitivity":
                reached.set()

        job = asyncio.ensure_future(run_job(spec, tmp_path / "models" / "small", on_event=seen))
        await asyncio.wait_for(reached.wait(), 60)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job

    asyncio.run(until_it_measures())
    assert list((tmp_path / "models").iterdir()) == []


def test_quantize_that_is_killed_with_nine_goes_on_and_makes_the_same(tmp_path: Path) -> None:
    model = write_case("llama_tied", tmp_path / "model")
    spec = Quantize(model=str(model), group_size=32, target_bpw=6.5, num_calibration=1, calibration_tokens=16)

    def start(output: Path, work: Path, most: int) -> bool:
        """Kill it after so many events, unless it comes to its end; whether it does."""
        command = [sys.executable, "-c", RUN, msgspec.json.encode(spec).decode(), str(output), str(work)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as child:
            assert child.stdout is not None
            for number, _ in enumerate(child.stdout):
                if number == most:
                    child.kill()
        return child.returncode == 0

    assert start(tmp_path / "a" / "out", tmp_path / "v" / "job", 10_000)
    ends = [start(tmp_path / "b" / "out", tmp_path / "w" / "job", most) for most in (2, 15, 30, 40, 10_000)]
    assert ends == [False, False, False, False, True]
    assert contents(tmp_path / "b" / "out") == contents(tmp_path / "a" / "out")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["out"]
