"""Jobs of the running server: list them, look at one, and say what is to become of it.

  mlxd jobs
  mlxd jobs show job_0123456789abcdef
  mlxd jobs follow job_0123456789abcdef
  mlxd jobs pause|resume|cancel|retry|pin|unpin|rm JOB

A paused job goes on from its last checkpoint when it is resumed, also after a restart of the server. `retry` begins a
job that failed once more, from its last checkpoint where there is one. `rm` forgets a job that is over; what it made
stays. The beginning of an id will do where no other begins so.
"""

import argparse
import time
from typing import Any

import msgspec

from parent.commands import options
from parent.commands.following import follow, line_of
from parent.commands.running import Running, call, require_running
from parent.commands.terminal import print_table
from shared.errors import ErrorCode, refuse
from shared.units import format_bytes, format_seconds

WORDS = ("cancel", "pause", "resume", "retry", "pin", "unpin")
VERBS = ("ls", "show", "log", "follow", *WORDS, "rm")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=VERBS, default="ls", help="ls (the default) or what to do")
    parser.add_argument("job", nargs="?", metavar="JOB", help="its id, or the beginning of it")
    parser.add_argument("--kind", help="ls: of this kind only")
    parser.add_argument("--state", help="ls: in this state only")
    parser.add_argument("--limit", type=int, default=20, help="ls: so many, the newest (default 20)")
    parser.add_argument("--json", action="store_true", help="ls, show: print JSON")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    running = require_running(options.settings_of(args).data_dir)
    if args.what == "ls":
        if args.job:
            raise refuse(ErrorCode.INVALID_REQUEST, f"`mlxd jobs ls` takes no id, not {args.job!r}")
        return _list(running, args)
    if not args.job:
        raise refuse(ErrorCode.INVALID_REQUEST, f"`mlxd jobs {args.what}` needs the id of a job")
    job_id = _whole(running, args.job)
    match args.what:
        case "show":
            return _show(running, job_id, as_json=args.json)
        case "log":
            return _log(running, job_id)
        case "follow":
            return follow(running, job_id)
        case "rm":
            call(running, "DELETE", f"/api/jobs/{job_id}")
            print(f"{job_id} is forgotten")
            return 0
    job = call(running, "POST", f"/api/jobs/{job_id}/{args.what}")["job"]
    said = f" (was {job['rerun_of']})" if args.what == "retry" else ""
    print(f"{job['id']} is {_state(job)}{said}")
    return 0


def _whole(running: Running, beginning: str) -> str:
    """The id that begins so. Raises `Refused` where it is none or several."""
    jobs = call(running, "GET", "/api/jobs?limit=1000")["jobs"]
    found = [job["id"] for job in jobs if job["id"].startswith((beginning, f"job_{beginning}"))]
    if len(found) > 1 and beginning not in found:
        raise refuse(
            ErrorCode.INVALID_REQUEST, f"{beginning!r} may mean {', '.join(found[:5])}; write more of it"
        )
    return beginning if beginning in found or not found else str(found[0])


def _list(running: Running, args: argparse.Namespace) -> int:
    query = f"limit={args.limit}"
    query += "".join(
        f"&{name}={value}" for name, value in (("kind", args.kind), ("state", args.state)) if value
    )
    jobs = call(running, "GET", f"/api/jobs?{query}")["jobs"]
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(jobs)).decode())
    elif not jobs:
        print("no jobs yet")
    else:
        print_table(["JOB", "KIND", "STATE", "PROGRESS", "AGE", "MAKES"], [_row(job) for job in jobs])
    return 0


def _row(job: dict[str, Any]) -> list[str]:
    age = format_seconds(max(time.time() - job["created_at"], 0.0))
    share = f"{job['progress']:.0%} {job['stage']}".strip() if job["started_at"] else ""
    return [job["id"], job["kind"], _state(job), share, age, job["output_path"].rpartition("/")[2]]


def _state(job: dict[str, Any]) -> str:
    """`running`, `running, paused for answers`, `queued, waits for …`, `stopping, then paused`."""
    said = str(job["status"])
    if job["becomes"]:
        said += f", then {job['becomes']}"
    if job["paused_for"]:
        said += f", paused for {job['paused_for']}"
    if job["waits_for"]:
        said += f", waits for {job['waits_for']}"
    return said


def _show(running: Running, job_id: str, *, as_json: bool) -> int:
    job = call(running, "GET", f"/api/jobs/{job_id}")["job"]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(job)).decode())
        return 0
    rows = [
        ("kind", job["kind"]),
        ("state", _state(job)),
        ("progress", f"{job['stage']} {job['done']} of {job['total']}" if job["total"] else ""),
        ("message", job["message"]),
        ("makes", job["output_path"]),
        ("attempt", str(job["attempt"]) if job["attempt"] > 1 else ""),
        ("checkpoint", f"step {job['checkpoint']['step']}" if job["checkpoint"] else ""),
        ("memory", format_bytes(job["peak_bytes"]) + " at most" if job["peak_bytes"] else ""),
        ("error", job["error"]["message"] if job["error"] else ""),
        ("advice", job["error"]["advice"] if job["error"] else ""),
        ("pinned", "yes" if job["pinned"] else ""),
    ]
    for name, value in rows:
        if value:
            print(f"{name:<12}{value}")
    return 0


def _log(running: Running, job_id: str) -> int:
    after = 0
    while True:
        page = call(running, "GET", f"/api/jobs/{job_id}/log?after={after}&limit=1000")
        for event in page["events"]:
            stamp = time.strftime("%H:%M:%S", time.localtime(event["at"]))
            print(f"{stamp}  {line_of(event)}")
        after = page["next"]
        if not page["more"]:
            return 0
