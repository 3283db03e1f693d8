"""Pulls from the hub as the command runs them: by the server of the data folder, or in a process of our own."""

import asyncio
import sys
import time
from typing import Any

import httpx2
import msgspec

from parent.commands.running import Running
from parent.commands.terminal import Progress
from parent.jobs import kinds, retry
from parent.jobs.run import run_job
from shared.errors import ErrorCode, Refused, refuse
from shared.jobs import JobDone, JobEvent, JobStage, PullRepo
from shared.units import format_seconds

POLL_S = 0.3


def pull_here(spec: PullRepo) -> JobDone:
    """Run the job, again after each loss of the network. Ctrl-C keeps what is there."""
    progress = Progress()
    try:
        return asyncio.run(_with_retries(spec, progress))
    finally:
        progress.close()


async def _with_retries(spec: PullRepo, progress: Progress) -> JobDone:
    fruitless = 0
    while True:
        growth = retry.Growth(kinds.KINDS[PullRepo].grows)

        def show(event: JobEvent, growth: retry.Growth = growth) -> None:
            if isinstance(event, JobStage):
                growth.see(event)
                _show(progress, event.stage, event.done, event.total)

        try:
            return await run_job(spec, "", on_event=show)
        except Refused as refused:
            fruitless, delay = retry.after(refused.failure, fruitless, grew=growth.grew)
            if delay is None:
                raise
            _say_retry(progress, refused.failure.message, delay)
            await asyncio.sleep(delay)


def pull_there(running: Running, model: str) -> JobDone:
    """Have the server do it, and watch. Ctrl-C pauses it there. A pull of the same that runs already is joined."""
    progress = Progress()
    job_id = ""
    with httpx2.Client(base_url=running.url, trust_env=False, timeout=10.0, headers=running.headers) as http:
        try:
            job = _begin(http, model)
            job_id = job["id"]
            return _follow(http, job, progress)
        except KeyboardInterrupt:
            if job_id:
                _ask(http, "POST", f"/admin/pulls/{job_id}/pause")
            raise
        except httpx2.HTTPError as error:
            raise refuse(
                ErrorCode.ENGINE_UNAVAILABLE,
                f"the server at {running.url} does not answer ({error}); a pull that was begun goes on when it is "
                "started again",
            ) from None
        finally:
            progress.close()


def _begin(http: httpx2.Client, model: str) -> dict[str, Any]:
    try:
        return _ask(http, "POST", "/admin/pulls", {"model": model})
    except Refused as refused:
        if refused.failure.code is not ErrorCode.CONFLICT:
            raise
        answer = msgspec.json.decode(http.get("/admin/pulls").content)
        for job in answer["jobs"]:
            if job["model"].lower() == model.lower() and job["status"] in ("queued", "starting", "running"):
                print(f"{job['id']} is at it already", file=sys.stderr)
                return dict(job)
        raise


def _follow(http: httpx2.Client, job: dict[str, Any], progress: Progress) -> JobDone:
    told_attempt = 0
    while True:
        match job["status"]:
            case "done":
                return JobDone(output=job["output_path"], summary=job["message"])
            case "failed" | "lost":
                error = job["error"] or {"message": f"{job['id']} failed"}
                raise refuse(_code(error), error["message"])
            case "cancelled" | "paused":
                raise refuse(ErrorCode.CONFLICT, f"{job['id']} was {job['status']} by somebody else")
            case "queued" if job["error"] and job["retry_at"] and told_attempt < job["attempt"]:
                told_attempt = job["attempt"]
                _say_retry(progress, job["error"]["message"], max(job["retry_at"] - time.time(), 0.0))
            case "running":
                _show(progress, job["stage"], job["done"], job["total"])
        time.sleep(POLL_S)
        job = _ask(http, "GET", f"/admin/pulls/{job['id']}")


def _ask(http: httpx2.Client, method: str, path: str, body: Any = None) -> dict[str, Any]:
    """The job of the answer. Raises `Refused` with the server's own reason."""
    answer = http.request(method, path, json=body)
    try:
        found = msgspec.json.decode(answer.content)
        if answer.is_success:
            return dict(found["job"])
        raise refuse(_code(found["error"]), found["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        raise refuse(
            ErrorCode.ENGINE_UNAVAILABLE, f"{answer.url} answered {answer.status_code} and nothing readable"
        ) from None


def _code(error: dict[str, Any]) -> ErrorCode:
    try:
        return ErrorCode(error.get("code", ""))
    except ValueError:
        return ErrorCode.INTERNAL


def _show(progress: Progress, stage: str, done: int, total: int) -> None:
    if total:
        progress(stage, done, total)


def _say_retry(progress: Progress, reason: str, delay_s: float) -> None:
    progress.close()
    print(f"{reason}; again in {format_seconds(delay_s)}", file=sys.stderr)
