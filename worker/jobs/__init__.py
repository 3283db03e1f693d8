"""Jobs of a job worker: the table of kinds, and `run`."""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path

from shared.control import LaunchJob
from shared.errors import ErrorCode, refuse
from shared.jobs import CountJob, ImportGguf, JobDone, JobEvent, JobSpec, JobStarted, NoopJob, PullRepo
from shared.lab import Benchmark, Dataset, Evaluate, Finetune, Fuse, MergeAdapters, Push, Quantize
from worker.jobs.context import JobContext

KINDS: Mapping[type[JobSpec], str] = {
    NoopJob: "worker.jobs.noop",
    CountJob: "worker.jobs.count",
    ImportGguf: "worker.jobs.import_gguf",
    PullRepo: "worker.jobs.pull_repo",
    Fuse: "worker.jobs.fuse",
    MergeAdapters: "worker.jobs.merge_adapters",
    Finetune: "worker.jobs.finetune",
    Quantize: "worker.jobs.quantize",
    Dataset: "worker.jobs.dataset",
    Evaluate: "worker.jobs.evaluate",
    Benchmark: "worker.jobs.benchmark",
    Push: "worker.jobs.push",
}
"""Spec to the module whose `run(spec, ctx)` does it; imported when asked for, so that each pays for itself."""


def run(launch: LaunchJob, emit: Callable[[JobEvent], None], should_stop: Callable[[], bool]) -> JobDone:
    """Run the job of the launch record. Raises `Refused` with what went wrong, or when stopped."""
    ctx = JobContext(
        emit,
        should_stop,
        output=Path(launch.output) if launch.output else None,
        work=Path(launch.work) if launch.work else None,
        resume=launch.resume,
    )
    kind = type(launch.spec)
    if kind not in KINDS:
        said = f"this version of mlxd cannot run jobs of kind {kind.__struct_config__.tag}"
        raise refuse(ErrorCode.UNSUPPORTED, said)
    module = importlib.import_module(KINDS[kind])
    emit(JobStarted())
    done: JobDone = module.run(launch.spec, ctx)
    return done
