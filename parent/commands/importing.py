"""Jobs as the commands run them: a job worker with a progress bar, and the folder it makes."""

import asyncio
from pathlib import Path

from parent.commands.terminal import Progress
from parent.config import Settings
from parent.jobs.run import run_job
from parent.library.catalog import ModelEntry
from parent.library.starter import pull_starter
from parent.workers.blas import worker_env
from shared.jobs import ImportGguf, JobDone, JobEvent, JobSpec, JobStage


def pull(settings: Settings) -> ModelEntry:
    """Fetch and convert the starter model, with progress on stderr."""
    progress = Progress()

    async def convert(spec: ImportGguf, output: Path) -> JobDone:
        return await _run(settings, spec, output, progress)

    try:
        return asyncio.run(pull_starter(settings.data_dir, run_job=convert, report=progress))
    finally:
        progress.close()


def run_with_progress(settings: Settings, spec: JobSpec, output: Path | str) -> JobDone:
    """Run one job, with progress on stderr."""
    progress = Progress()
    try:
        return asyncio.run(_run(settings, spec, output, progress))
    finally:
        progress.close()


async def _run(settings: Settings, spec: JobSpec, output: Path | str, progress: Progress) -> JobDone:
    def show(event: JobEvent) -> None:
        if isinstance(event, JobStage):
            progress(event.stage, event.done, event.total)

    env, _ = worker_env(settings)
    return await run_job(spec, output, on_event=show, worker_env=env)
