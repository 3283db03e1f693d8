"""`POST /api/{quantize|finetune|dataset}/push`: what jobs made here, up to the hub, as a job.

Nothing else on this disk can be pushed: a folder has to lie in the part of the data folder that such jobs write to.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from parent.bodies import read_json
from parent.config import Settings
from parent.jobs.queue import JobQueue
from parent.jobs.states import State
from parent.library.hub_token import HubToken
from shared import asgi
from shared.errors import ErrorCode, refuse
from shared.lab import Push

MOST_BYTES = 16 * 1024
MADE_IN = {"quantize": "models", "finetune": "adapters", "dataset": "datasets"}
"""The folder of the data folder that the jobs of each kind write to."""
KINDS = {
    "quantize": ("quantize", "fuse"),
    "finetune": ("finetune", "merge_adapters"),
    "dataset": ("dataset",),
}
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")


class PushBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`job_id`: of the job that made it; or `source_path`: its name, or the path of its folder."""

    repo_id: str
    job_id: str = ""
    source_path: str = ""
    private: bool = True


class Pushed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. `url`: where it will be."""

    ok: bool = True
    job_id: str
    url: str
    job: dict[str, Any]


class PushRoutes:
    """The routes. `settings` gives those in force now."""

    def __init__(self, queue: JobQueue, settings: Callable[[], Settings], token: HubToken) -> None:
        self.queue, self.settings, self.token = queue, settings, token

    async def push(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """202 with the job, and where it will be."""
        kind = scope["path"].split("/")[2]
        body = await read_json(receive, PushBody, MOST_BYTES, silence_s=self.settings().request_wait_s)
        if not _REPO.fullmatch(body.repo_id):
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"{body.repo_id[:80]!r} is no repository; write ORG/NAME",
                param="repo_id",
            )
        if not self.token.has_any():
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                "there is no token for the hub; give one to POST /api/settings/hf-token, or set HF_TOKEN",
                param="token",
            )
        folder = await self._folder(kind, body)
        spec = Push(
            folder=str(folder),
            repo=body.repo_id,
            private=body.private,
            kind="dataset" if kind == "dataset" else "model",
        )
        job = await self.queue.submit(spec)
        answer = Pushed(job_id=job.id, url=url_of(body.repo_id, spec.kind), job=self.queue.view(job))
        await asgi.respond(send, 202, msgspec.json.encode(answer))

    async def _folder(self, kind: str, body: PushBody) -> Path:
        if bool(body.job_id) == bool(body.source_path):
            raise refuse(
                ErrorCode.INVALID_REQUEST, "give job_id or source_path, one of them", param="source_path"
            )
        root = self.settings().data_dir / MADE_IN[kind]
        if body.source_path:
            return made_here(root, body.source_path)
        job = await self.queue.get(body.job_id)
        if job.kind not in KINDS[kind] or job.state is not State.DONE or not job.output:
            raise refuse(
                ErrorCode.CONFLICT,
                f"{job.id} is a {job.kind} and {job.state}; only what a finished {' or '.join(KINDS[kind])} made is "
                "pushed here",
                param="job_id",
            )
        return made_here(root, job.output)


def made_here(root: Path, source: str) -> Path:
    """The folder of a name below `root`, or of a path there. Raises `Refused` (forbidden, not_found)."""
    base = os.path.realpath(root)
    real = base if "\0" in source else os.path.realpath(root / source)  # an absolute path stands for itself
    if real == base or not real.startswith(base + os.sep):
        raise refuse(
            ErrorCode.FORBIDDEN,
            f"{source[:200]!r} is not in {root}: only what jobs made is",
            param="source_path",
        )
    if not os.path.isdir(real):
        raise refuse(ErrorCode.NOT_FOUND, f"there is no folder {real}", param="source_path")
    return Path(real)


def url_of(repo: str, kind: str) -> str:
    """The page of a repository on the hub."""
    parts = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    hub = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    return f"{hub}/datasets/{repo}" if kind == "dataset" else f"{hub}/{repo}"
