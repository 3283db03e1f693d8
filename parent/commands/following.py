"""A job of the running server, as a person watches it: a bar, its log below, and how it ended."""

import sys
import time
from typing import Any

from parent.commands.running import Running, call
from parent.commands.terminal import Progress
from shared.errors import ErrorCode, Refused, refuse
from shared.units import format_bytes, format_seconds

POLL_S = 0.3
PATIENCE_S = 60.0  # with a server that restarts


def follow(running: Running, job_id: str) -> int:
    """Until it is over. Ctrl-C leaves it to the server. The exit code."""
    progress = Progress()
    after, told = 0, ""
    try:
        while True:
            job = _patiently(running, f"/api/jobs/{job_id}", progress)["job"]
            after = _show_log(running, job_id, after, progress)
            if job["status"] in ("done", "failed", "lost", "cancelled", "paused"):
                return _ended(job, progress)
            told = _say(progress, _state(job), told)
            if job["status"] == "running" and job["total"] and not job["paused_for"]:
                progress(job["stage"], job["done"], job["total"])
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        progress.close()
        print(f"mlxd: {job_id} goes on; `mlxd jobs follow {job_id}` shows it again", file=sys.stderr)
        return 130
    finally:
        progress.close()


def line_of(event: dict[str, Any]) -> str:
    """One thing that a job told, for a person; "" for what a bar shows."""
    match event["type"]:
        case "log":
            return str(event["line"])
        case "metric":
            return _metric(event)
        case "saved":
            return f"checkpoint after step {event['step']}"
        case "stage":
            return f"stage {event['stage']}"
        case "state":
            return f"is {event['state']}"
    return str(event)


def _metric(event: dict[str, Any]) -> str:
    words = {"train": "loss", "val": "held-out loss"}.get(event["kind"], event["kind"])
    said = f"step {event['step']}: {words} {event['loss']:.4f}"
    if event.get("tokens_per_s"):
        said += f", {event['tokens_per_s']:.0f} tokens/s"
    if event.get("peak_bytes"):
        said += f", peak {format_bytes(event['peak_bytes'])}"
    return said


def _show_log(running: Running, job_id: str, after: int, progress: Progress) -> int:
    """What came since, but for what the bar shows. The id of the last one."""
    while True:
        page = _patiently(running, f"/api/jobs/{job_id}/log?after={after}", progress)
        for event in page["events"]:
            if event["type"] in ("log", "metric"):
                _print(progress, line_of(event))
        after = page["next"]
        if not page["more"]:
            return int(after)


def _state(job: dict[str, Any]) -> str:
    """What is worth saying beside the bar."""
    if job["status"] == "queued" and job["waits_for"]:
        return f"waits for {job['waits_for']}"
    if job["status"] == "queued" and job["retry_at"] and job["error"]:
        left = max(job["retry_at"] - time.time(), 0.0)
        return f"{job['error']['message']}; attempt {job['attempt'] + 1} in {format_seconds(left)}"
    return f"paused for {job['paused_for']}" if job["paused_for"] else ""


def _say(progress: Progress, said: str, told: str) -> str:
    if said and said.partition("; attempt")[0] != told.partition("; attempt")[0]:
        _print(progress, said)
    return said


def _print(progress: Progress, line: str) -> None:
    progress.close()
    print(line, file=sys.stderr)


def _ended(job: dict[str, Any], progress: Progress) -> int:
    progress.close()
    if job["status"] == "done":
        made = f"{job['output_path']} is ready" if job["output_path"] else job["id"]
        print(f"{made} ({job['message']})" if job["message"] else made)
        return 0
    if job["status"] in ("cancelled", "paused"):
        print(f"mlxd: {job['id']} was {job['status']}", file=sys.stderr)
        return 1
    error = job["error"] or {"message": "it left no reason", "advice": ""}
    advice = f"; {error['advice']}" if error["advice"] else ""
    print(f"mlxd: {job['id']} {job['status']}: {error['message']}{advice}", file=sys.stderr)
    return 1


def _patiently(running: Running, path: str, progress: Progress) -> dict[str, Any]:
    """An answer, also of a server that restarts meanwhile. Raises `Refused`."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            found: dict[str, Any] = call(running, "GET", path)
            return found
        except Refused as refused:
            if refused.failure.code is not ErrorCode.ENGINE_UNAVAILABLE:
                raise
            if time.monotonic() > until:
                raise refuse(
                    ErrorCode.ENGINE_UNAVAILABLE,
                    f"the server at {running.url} does not answer; the job goes on when it is started again",
                ) from None
            progress.close()
            time.sleep(POLL_S)
