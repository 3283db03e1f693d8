"""What is forgotten of jobs, and the folders that go with them."""

import asyncio
from collections.abc import Collection
from pathlib import Path

from parent.jobs.record import Folder
from parent.jobs.retention import Retention, forgotten
from parent.jobs.store import Jobs


async def clear_up(store: Jobs, root: Path, now: float, terms: Retention) -> None:
    """Forget jobs by age and bytes, and remove the folders of those that are not in the store. Raises `Refused`."""
    jobs = await store.finished()
    sizes = await asyncio.to_thread(lambda: {job.id: Folder(root, job.id).size() for job in jobs})
    await forget(store, root, forgotten(jobs, sizes, now, terms))
    known = {job.id for job in await store.find(limit=-1)}
    await asyncio.to_thread(_remove_strangers, root, known)


async def forget(store: Jobs, root: Path, job_ids: Collection[str]) -> None:
    """Jobs that are over, with all that is kept of them; what they made stays. Raises `Refused`."""
    await store.delete(job_ids)
    for job_id in job_ids:
        await asyncio.to_thread(Folder(root, job_id).tidy, keep=False)


def move(root: Path, old: str, new: str) -> bool:
    """The folder of a job becomes another one's. False where there is none."""
    try:
        (root / old).rename(root / new)
    except OSError:
        return False
    return True


def _remove_strangers(root: Path, known: Collection[str]) -> None:
    try:
        found = [path.name for path in root.iterdir() if path.name.startswith("job_")]
    except OSError:
        return
    for name in found:
        if name not in known:
            Folder(root, name).tidy(keep=False)
