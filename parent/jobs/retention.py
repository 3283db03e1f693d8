"""Which jobs that are over are forgotten: the old ones, and the oldest where all together take too much. Pure."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parent.jobs.store import Finished


class Retention(NamedTuple):
    """`keep_s` since they ended; `most_bytes` of what they told and of their folders together; `most_jobs`."""

    keep_s: float = 90 * 86400.0
    most_bytes: int = 1 << 30
    most_jobs: int = 10_000


def forgotten(
    jobs: Sequence[Finished], folders: Mapping[str, int], now: float, terms: Retention
) -> list[str]:
    """The ids of those to be deleted. `jobs`: the newest first, without the pinned; `folders`: bytes by id."""
    gone, held = [], 0
    for place, job in enumerate(jobs):
        held += job.bytes + folders.get(job.id, 0)
        if place >= terms.most_jobs or job.ended_at < now - terms.keep_s or held > terms.most_bytes:
            gone.append(job.id)
    return gone
