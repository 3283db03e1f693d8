"""Upload a folder that a job made to a repository of the hub: file by file, then one commit that shows them all.

What the hub has already is not sent again, so a job that was stopped goes on where it was. Endpoint and token are those
of `huggingface_hub`. Nothing of the folder but its own files leaves: no hidden ones, none that links lead out to.
"""

import os
from pathlib import Path
from typing import Any

import httpx2

from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import JobDone, JobStage
from shared.lab import Push
from shared.units import format_bytes
from worker.jobs.context import JobContext
from worker.jobs.hub import endpoint, explain  # before the library: it sets its variables
from worker.lab.cards import CARD, card_of

from huggingface_hub import CommitOperationAdd, HfApi, get_token  # isort: skip
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled  # isort: skip

MESSAGE = "Upload by mlxd"
PRIVATE = {"report.json", "units.jsonl"}
"""Of a data set: what it was made of may name folders and texts of its maker."""


def run(spec: Push, ctx: JobContext) -> JobDone:
    """Raises `Refused`: invalid_request, hub (with `retry_after_s` where trying again may help), shutting_down."""
    folder = Path(spec.folder)
    files = files_of(folder)
    if spec.kind == "dataset":
        files = [file for file in files if file.name not in PRIVATE]
    if not files:
        raise refuse(ErrorCode.INVALID_REQUEST, f"{folder}: there is nothing to push", param="folder")
    if not get_token():
        raise refuse(
            ErrorCode.HUB, f"there is no token for {endpoint()}; set HF_TOKEN, or give one in the settings"
        )
    try:
        return _pushed(spec, ctx, folder, files)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
        raise _why(error, spec.repo) from None
    except RuntimeError as error:  # the library's, around one of these
        if isinstance(error.__cause__, HfHubHTTPError | httpx2.HTTPError):
            raise _why(error.__cause__, spec.repo) from None
        raise
    except ValueError as error:
        raise refuse(ErrorCode.INVALID_REQUEST, f"{spec.repo}: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise refuse(
            ErrorCode.CONFLICT, f"{error.filename or folder}: cannot be read ({error.strerror or error})"
        ) from None


def _pushed(spec: Push, ctx: JobContext, folder: Path, files: list[Path]) -> JobDone:
    api = HfApi()
    ctx.emit(JobStage("create", message=spec.repo))
    url = api.create_repo(spec.repo, repo_type=spec.kind, private=spec.private, exist_ok=True)
    total, done = sum(file.stat().st_size for file in files), 0
    operations: list[Any] = []
    if not (folder / CARD).is_file():
        operations.append(CommitOperationAdd(CARD, card_of(folder, spec.repo, spec.kind).encode()))
    for file in files:
        ctx.check()
        name = file.relative_to(folder).as_posix()
        ctx.emit(JobStage("upload", done, total, name))
        addition = CommitOperationAdd(name, str(file))
        api.preupload_lfs_files(spec.repo, [addition], repo_type=spec.kind, num_threads=1, free_memory=False)
        operations.append(addition)
        done += file.stat().st_size
    ctx.check()
    ctx.emit(JobStage("upload", total, total))
    ctx.emit(JobStage("commit"))
    commit = api.create_commit(spec.repo, operations, commit_message=MESSAGE, repo_type=spec.kind)
    summary = f"{len(files)} files, {format_bytes(total)} at {url} ({commit.oid[:7]})"
    return JobDone("", summary, {"url": str(url), "commit": commit.oid})


def files_of(folder: Path) -> list[Path]:
    """The files below a folder, in order. Raises `Refused` where a link leads out of it."""
    root = os.path.realpath(folder)
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            if name.startswith("."):
                continue
            if not os.path.realpath(path).startswith(root + os.sep):
                raise refuse(
                    ErrorCode.INVALID_REQUEST,
                    f"{path} leads out of the folder; put the file there",
                    param="folder",
                )
            if path.is_file():
                found.append(path)
    return found


def _why(error: Exception, repo: str) -> Refused:
    if isinstance(error, HfHubHTTPError) and error.response is not None and error.response.status_code == 403:
        said = f"{endpoint()} does not let this token write to {repo}; set HF_TOKEN to one that may"
        return refuse(ErrorCode.HUB, said)
    return explain(error, repo)
