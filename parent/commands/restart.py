"""Restart the running server in place: the program on disk takes over, workers and their models stay loaded.

  mlxd restart          answers that run may finish first; new ones wait meanwhile
  mlxd restart --now    answers that run end with an error

Where the answers do not end within `drain_s` nothing is restarted and nothing is lost.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from parent.admin.restart import RestartBody, RestartStatus
from parent.commands import options
from parent.commands.running import Running, find_running, require_running
from shared.errors import ErrorCode, Refused, refuse

ASK_S = 90.0  # the server tries the new program first
SLACK_S = 60.0  # for a start, beyond the drain
AGAIN_S = 0.1


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--now", action="store_true", help="do not wait for running answers")
    options.add_settings(parser, ("data_dir", "drain_s"))


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    running = require_running(settings.data_dir)
    before = begin(running, now=args.now)
    if before.state == "draining":
        print("new requests wait; running answers finish first" if not args.now else "answers are cut")
    until = time.monotonic() + settings.drain_s + SLACK_S
    running, after = outcome(settings.data_dir, running, before.boot, until)
    print(f"restarted: {running.url} (pid {after.pid})")
    if after.reason:
        print(after.reason, file=sys.stderr)
    return 0


def begin(running: Running, *, now: bool) -> RestartStatus:
    """Ask for the restart. Raises `Refused` with the server's own reason."""
    try:
        with _client(running, ASK_S) as client:
            answer = client.post("/admin/restart", content=msgspec.json.encode(RestartBody(now)))
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise _silent(running, error) from None
    if answer.status_code != 202:
        raise refuse(ErrorCode.CONFLICT, _message(answer))
    return msgspec.json.decode(answer.content, type=RestartStatus)


def outcome(data_dir: Path, running: Running, boot: str, until: float) -> tuple[Running, RestartStatus]:
    """Wait for the new image, which may listen elsewhere.

    Raises `Refused` where the restart was given up, or nobody answers any more.
    """
    last: object = "no answer"
    found: Running | None = running
    while time.monotonic() < until:
        before, found = found, find_running(data_dir)
        if found is None and before is None:  # once is while it writes down where it is
            raise _silent(running, "it has ended")
        running = found if found is not None and found.url else running
        try:
            with _client(running, max(1.0, until - time.monotonic())) as client:
                answer = client.get("/admin/restart")
                answer.raise_for_status()
                status = msgspec.json.decode(answer.content, type=RestartStatus)
        except (httpx2.HTTPError, msgspec.MsgspecError) as error:  # it has moved, or has ended
            last = error
        else:
            if status.boot != boot:  # it has written down where it is before it answered
                return find_running(data_dir) or running, status
            if status.state == "given_up":
                raise refuse(ErrorCode.CONFLICT, f"not restarted: {status.reason}")
            last = f"it is still {status.state}"
        time.sleep(AGAIN_S)
    raise _silent(running, last)


def _client(running: Running, timeout_s: float) -> httpx2.Client:
    # A connection of its own for each question: it asks whoever accepts now.
    return httpx2.Client(
        base_url=running.url,
        trust_env=False,
        timeout=timeout_s,
        headers={**running.headers, "connection": "close"},
    )


def _silent(running: Running, error: object) -> Refused:
    return refuse(
        ErrorCode.ENGINE_UNAVAILABLE,
        f"the server at {running.url} (pid {running.pid}) does not answer: {error}; look at its log",
    )


def _message(answer: httpx2.Response) -> str:
    try:
        body: Any = msgspec.json.decode(answer.content)
        return str(body["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return f"the server answered with status {answer.status_code}"
