"""Quantizing in a worker process: its events reach whoever waits, and ending it leaves nothing behind."""

import asyncio
from pathlib import Path

import pytest

from parent.jobs.run import run_job
from shared.checkpoint import inspect
from shared.errors import ErrorCode, Refused
from shared.jobs import JobDone, JobEvent, JobStage, JobStarted
from shared.lab import Quantize
from tests.oracles.checkpoints import write_case


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
