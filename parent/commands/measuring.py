"""What `mlxd eval` and `mlxd bench` share: a job, here or by the server, and the table of what was measured."""

import asyncio
import secrets
import sys
import time
from typing import Any
from urllib.parse import urlencode

import msgspec

from parent.commands.importing import run_with_progress
from parent.commands.running import Running, call
from parent.commands.terminal import Progress, print_table
from parent.config import Settings
from parent.db import Database
from parent.jobs.evaluations import Evaluation, Evaluations, evaluation_of
from shared.errors import ErrorCode, refuse
from shared.lab import Benchmark, Evaluate

POLL_S = 0.3
USUAL = 10


def measure_here(settings: Settings, spec: Evaluate | Benchmark) -> list[Evaluation]:
    """Run the job in a process of ours and keep what it finds. -> what is known of its model, newest first."""
    done = run_with_progress(settings, spec, "")
    one = evaluation_of(
        spec, done.result, job_id=f"cli_{secrets.token_hex(8)}", summary=done.summary, at=time.time()
    )
    return asyncio.run(_kept(settings, one))


async def _kept(settings: Settings, one: Evaluation) -> list[Evaluation]:
    db = Database(settings.data_dir).open()
    try:
        table = Evaluations(db)
        await table.add(one)
        return await table.find(model=one.model, kind=one.kind)
    finally:
        await db.close()


def measure_there(running: Running, body: dict[str, Any]) -> list[Evaluation]:
    """Have the server do it, and watch. Ctrl-C leaves it to the server. -> as `measure_here`."""
    job = call(running, "POST", "/api/evaluations", body)["job"]
    progress = Progress()
    try:
        while job["status"] not in ("done", "failed", "cancelled", "lost"):
            if job["total"]:
                progress(job["stage"], job["done"], job["total"])
            time.sleep(POLL_S)
            job = call(running, "GET", f"/api/jobs/{job['id']}")["job"]
    finally:
        progress.close()
    if job["status"] != "done":
        said = (job["error"] or {}).get("message") or f"{job['id']} is {job['status']}"
        raise refuse(ErrorCode.CONFLICT, said)
    rows = history_there(running, "", str(body["kind"]))
    mine = [row for row in rows if row.job_id == job["id"]]
    return [row for row in rows if mine and row.model == mine[0].model]


def history_there(running: Running, model: str, kind: str) -> list[Evaluation]:
    """What the server knows."""
    query = urlencode({"model": model, "kind": kind, "limit": 1000})
    found = call(running, "GET", f"/api/evaluations?{query}")["evaluations"]
    return msgspec.convert(found, list[Evaluation])


async def history_here(settings: Settings, model: str, kind: str) -> list[Evaluation]:
    """What the data folder knows."""
    db = Database(settings.data_dir).open()
    try:
        return await Evaluations(db).find(model=model, kind=kind, limit=1000)
    finally:
        await db.close()


def show(rows: list[Evaluation], *, as_json: bool) -> None:
    """The newest in full, beside the one before it; the others in a line each."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(rows)).decode())
        return
    if not rows:
        print("nothing was measured yet", file=sys.stderr)
        return
    newest = rows[0]
    print(f"{newest.model}: {newest.summary}")
    before = newest.before or {}
    print_table(
        ["NUMBER", "NOW", "BEFORE", "CHANGE"],
        [
            [name, _number(value), _number(before.get(name)), _change(value, before.get(name))]
            for name, value in newest.numbers.items()
        ],
    )
    if len(rows) > 1:
        print()
        print_table(
            ["WHEN", "MODEL", "VERSION", "RESULT"],
            [
                [
                    time.strftime("%Y-%m-%d %H:%M", time.localtime(row.at)),
                    row.model,
                    row.versions.get("mlxd", "-"),
                    row.summary,
                ]
                for row in rows[:USUAL]
            ],
        )


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) and value >= 1000 else f"{value:.6g}"


def _change(now: float, before: float | None) -> str:
    if not before:
        return "-"
    return f"{(now - before) / abs(before):+.1%}"
