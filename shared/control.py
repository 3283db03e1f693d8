"""The control channel: NDJSON over an inherited socket pair, one JSON object a line.

Order: the worker says `Hello`, is told a launch record, reports `Progress` until it is `Ready` (a model) or
sends `JobUpdate`s (a job). End of file at the parent means that the worker is gone. End of file at a worker means that
the parent is gone. A model worker waits `grace_s` for a new one: that one connects to the control socket, says `Adopt`
with the nonce of the launch record, and is answered `Hello` and `Ready`; in the same packet it may hand over the write
end of a pipe for the worker's output. So does a job worker that was given a nonce: it works on meanwhile, is answered
`Hello`, and tells again what the old parent has not said `Heard` of. A job worker without a nonce leaves.
"""

from enum import IntEnum

import msgspec

from shared.errors import Failure
from shared.jobs import JobEvent, JobSpec
from shared.wire import ModelFacts, WorkerStats


class ExitCode(IntEnum):
    """How a worker says why it left. 2, 3 and 4 are permanent: starting again would end the same way."""

    CLEAN = 0
    WIRE = 2  # refused the launch record
    CHECKPOINT = 3
    CANNOT_FIT = 4
    ENGINE = 5
    BUG = 70


# ---------------------------------------------------------------- worker to parent


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message: who is there. The parent compares `wire` before it sends anything."""

    wire: int
    version: str
    pid: int


class Progress(msgspec.Struct, frozen=True, tag="progress", omit_defaults=True):
    """Loading goes on; re-arms the stall deadline. Units of `done` and `total` are bytes where known."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded and the data channel is served."""

    facts: ModelFacts
    measured_bytes: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Once a second. `busy_s`: how long the engine has been in its present step (0 = idle)."""

    stats: WorkerStats
    busy_s: float = 0.0


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """No request is in flight any more."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The worker cannot go on; it leaves right after this."""

    failure: Failure


class JobUpdate(msgspec.Struct, frozen=True, tag="job", omit_defaults=True):
    """What a job worker has to tell. `seq` counts from 1 what is told again until it was `Heard`; 0: it does not matter
    once there is something newer.
    """

    event: JobEvent
    seq: int = 0


FromWorker = Hello | Progress | Ready | Heartbeat | Drained | Fatal | JobUpdate

# ---------------------------------------------------------------- parent to worker


class LaunchModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="launch_model"):
    """Load this model directory and serve it.

    `dtype`: "auto" = float32 on mlx's CPU backend, the checkpoint's own elsewhere. `max_context`,
    `prefill_chunk` and `max_rows`: 0 = the engine's choice for the model and device. `prefix_cache_bytes`:
    cap of the KV kept for reuse (0 = off). `kv_bytes`: cap of the KV of all rows together (0 = none). `kv_cache`,
    `kv_start`: how tokens are kept, and from which on; see `shared.kv_layout.quantized`. `check_prefix`: for debugging,
    compare each reused prompt with one run whole. `provider`: whose graph, see `shared.providers`. `messages`:
    "as_sent" = not repaired where the chat template refuses them, "auto" = they are. `spill_dir`: where
    kept prompts lie on disk ("" = nowhere), at most `spill_bytes` of all models together, leaving `disk_floor_bytes` of
    the disk free. `nonce`: what a new parent must say to adopt this
    worker, for which it waits `grace_s` once its own is gone (0 = leave at once).
    """

    model_id: str
    path: str
    dtype: str = "auto"
    max_context: int = 0
    prefill_chunk: int = 0
    max_rows: int = 8
    prefix_cache_bytes: int = 1 << 30
    kv_bytes: int = 0
    kv_cache: str = "auto"
    kv_start: int = 0
    provider: str = "auto"
    check_prefix: bool = False
    messages: str = "auto"
    spill_dir: str = ""
    spill_bytes: int = 0
    disk_floor_bytes: int = 0
    nonce: str = ""
    grace_s: float = 0.0


class LaunchJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="launch_job"):
    """Run this job; what it makes appears at `output`, whole or not at all.

    `work`: a folder that outlives the process, for checkpoints. `resume`: of the last `JobSaved` of the same job, "" =
    from the beginning. `spool`: a file for what is told, until it was heard ("" = none). `nonce`: what a new parent has
    to say to adopt this worker, which works on for `grace_s` once its own is gone (0 = it leaves at once).
    """

    job_id: str
    spec: JobSpec
    output: str = ""
    work: str = ""
    resume: str = ""
    spool: str = ""
    nonce: str = ""
    grace_s: float = 0.0


class Adopt(msgspec.Struct, frozen=True, tag="adopt", omit_defaults=True):
    """The first message of a new parent; a wrong nonce or wire ends the connection, not the wait. `heard`: of a job's
    updates the last one that was written down.
    """

    wire: int
    version: str
    nonce: str
    heard: int = 0


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """The updates of a job up to this one are written down, and need not be told again."""

    seq: int


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Jobs: wait before the next step, with all that is in memory, until `GoOn` (or `Cancel`)."""


class GoOn(msgspec.Struct, frozen=True, tag="go_on"):
    """Jobs: take the next step."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new requests; when none is in flight write the prefix cache to `spill_dir` and answer `Drained`."""


class Resize(msgspec.Struct, frozen=True, kw_only=True, tag="resize"):
    """The caps of the launch record are these now. Requests that run keep what they were promised."""

    kv_bytes: int
    prefix_cache_bytes: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Jobs: stop at the next safe point and leave."""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave now, cleanly."""


ToWorker = LaunchModel | LaunchJob | Adopt | Heard | Hold | GoOn | Drain | Resize | Cancel | Shutdown
