"""What the fake worker is told to do: its pace, its length, and its sins.

A script is JSON. It is read from `fake.json` in the model directory, then from the environment variable
`MLXD_FAKE`, and a request may add to it with `fake:{...}` in its prompt text, up to the end of that text.
"""

import os
from pathlib import Path
from typing import Any

import msgspec


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """Every knob has a good default: an obedient worker that answers at once."""

    # pace and length
    tokens: int = 12  # the answer's natural length; `max_tokens` may cut it
    ms_per_token: float = 0.0
    tokens_per_event: int = 1
    lockstep: bool = False  # all streams step together, as the rows of one engine do
    reasoning: int = 0  # so many tokens at the start are reasoning
    calls: tuple[
        tuple[str, str], ...
    ] = ()  # (name, arguments): after its text it calls what is offered of these
    queue_ms: float = 0.0  # accepted, but not running yet
    prefill_ms: float = 0.0
    prefill_chunks: int = 0
    stamp: bool = False  # the text of a token is the monotonic clock in ns, for latency measurements
    heartbeat_ms: float = 1000.0
    measured_bytes: int = 1  # told with Ready
    footprint: int = 0  # told in every heartbeat
    ballast: int = 0  # bytes that it really holds

    context: int = 0  # a prompt of so many words is too long; 0 = none is

    # sins of a process
    load_ms: float = 0.0
    load_steps: int = 1
    no_hello: bool = False
    wire: int | None = None  # speak another version of the wire
    fatal: str = ""  # an error code: Fatal while loading
    fatal_with_rows: int = 0  # …only where the launch record has so many rows
    fatal_message: str = "config.json has no model_type"
    exit_code: int = 0  # with `fatal`: leave with this code
    crash_at_load: int = 0  # die while loading, this many spawns
    silent_load: bool = False  # say no progress at all, never be ready
    ignore_term: bool = False
    ignore_shutdown: bool = False
    ignore_drain: bool = False
    mute: bool = False  # no heartbeats once ready
    exit_zero: bool = False  # leave with 0 while loading, as if all were well
    garbage_control: int = 0  # lines that are no message, on the control channel
    flood: bool = False  # print as fast as it goes
    says: list[str] = []  # printed when it loads, and when it is adopted

    # sins of a request
    crash_after: int = -1  # SIGKILL itself after so many content events (0 = before the first)
    crash_at: int = -1  # SIGKILL itself before the token of this position, resumed or not
    crash_times: int = 1  # …in so many spawns, then behave
    hang_after: int = -1  # SIGSTOP itself after so many content events
    hang_times: int = 1  # …and before each of the next events, so often in all
    freeze_after: int = -1  # its whole process does nothing any more after so many content events
    stall_after: int = -1  # heartbeats go on, but this request never does
    hold_after: int = -1  # …does not until there is a file `release` in the model directory
    fail_after: int = -1  # a Failed event after so many content events
    cut_after: int = -1  # close the connection without a last event
    refuse: str = ""  # an error code: answer 400 before any event
    garbage: bool = False  # an event line that is no event


def load(model_path: str) -> dict[str, Any]:
    """The process's script as plain JSON; an absent file or variable adds nothing."""
    found: dict[str, Any] = {}
    file = Path(model_path) / "fake.json"
    if model_path and file.is_file():
        found |= msgspec.json.decode(file.read_bytes())
    found |= msgspec.json.decode(os.environ.get("MLXD_FAKE", "{}"))
    return found


def for_request(base: dict[str, Any], prompt_text: str) -> Script:
    """The script of one request: the process's, plus what its prompt says after `fake:`."""
    _, marker, directive = prompt_text.rpartition("fake:")
    extra = msgspec.json.decode(directive) if marker else {}
    return msgspec.convert(base | extra, Script)
