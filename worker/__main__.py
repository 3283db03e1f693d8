"""`python -m worker --control-fd N --data-fd M`: say hello, hear what to be, be it, leave with a telling code.

The branch is imported only when it is known, so that a job that needs no mlx never loads it.
"""

import argparse
import faulthandler
import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import NoReturn

from shared.control import (
    Adopt,
    Cancel,
    Drain,
    ExitCode,
    Fatal,
    GoOn,
    Heard,
    Heartbeat,
    Hold,
    LaunchJob,
    LaunchModel,
    Resize,
    Shutdown,
    ToWorker,
)
from shared.errors import ErrorCode, Failure, Refused
from shared.logs import configure
from shared.wire import WorkerStats
from worker.control import Control, die_with_parent, guard
from worker.leave import exit_code, leave


def main() -> None:
    """Runs until the work is done or the parent is gone."""
    parser = argparse.ArgumentParser(prog="worker", description="A worker process of mlxd; started by it.")
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--data-fd", type=int, default=-1, help="a listening Unix socket; -1 for jobs")
    parser.add_argument("--adopt-fd", type=int, default=-1, help="a listening Unix socket for a later parent")
    args = parser.parse_args()
    die_with_parent()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the parent asks for the stacks of a hung worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    configure(os.environ.get("MLXD_LOG_LEVEL", "info"), json=True)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.captureWarnings(True)
    threading.excepthook = _thread_failed
    control = Control(args.control_fd, args.adopt_fd)
    control.hello(os.getpid())
    while True:
        match control.receive():
            case None | Shutdown():
                raise SystemExit(ExitCode.CLEAN)
            case LaunchModel() as launch:
                guard()
                _serve(launch, control, args.data_fd)
            case LaunchJob() as launch:
                raise SystemExit(_work(launch, control))
            case Drain() | Cancel() | Adopt() | Resize() | Heard() | Hold() | GoOn():
                continue  # nothing has begun


def _serve(launch: LaunchModel, control: Control, data_fd: int) -> NoReturn:
    """Start reading the weights, then import the rest: half of a start is reading, half is importing."""
    from worker.engine.engine import Engine
    from worker.load import begin_load

    def fail(failure: Failure) -> NoReturn:
        control.send(Fatal(failure))
        leave(exit_code(failure))

    def on_fault(error: BaseException) -> None:
        text = f"the engine failed: {type(error).__name__}: {error}"
        fail(Failure(ErrorCode.ENGINE_FAULT, text))

    try:
        engine = Engine(None, on_fault)
        loading = begin_load(launch, engine, control.progress)
        import uvloop

        from worker.serve import serve

        uvloop.run(serve(launch, control, data_fd, engine, loading))
    except Refused as refused:
        fail(refused.failure)
    except Exception as error:
        logging.getLogger("worker").exception("worker.failed")
        fail(Failure(ErrorCode.INTERNAL, f"the worker failed: {type(error).__name__}: {error}"))
    leave(ExitCode.BUG)  # serve never returns


def _work(launch: LaunchJob, control: Control) -> int:
    """Run a job on this thread; the parent's messages come in on another."""
    from worker import jobs
    from worker.jobs.failing import failure_of
    from worker.jobs.gate import Gate
    from worker.jobs.outbox import Outbox

    for talkative in ("httpx2", "httpx", "httpcore2", "httpcore", "huggingface_hub"):
        logging.getLogger(talkative).setLevel(logging.WARNING)  # below, they log addresses that are signed
    gate = Gate()
    outbox = Outbox(control.send, Path(launch.spool) if launch.spool else None)

    def on_message(message: ToWorker) -> None:
        match message:
            case Cancel() | Shutdown():
                gate.stop()
            case Hold():
                gate.hold()
            case GoOn():
                gate.go_on()
            case Heard(seq=seq):
                outbox.heard(seq)
            case Adopt(heard=seq):
                outbox.tell_again(seq)

    control.may_be_adopted(launch.nonce, launch.grace_s)
    # Without a parent nobody is answered, so there is nobody to wait for.
    control.listen(on_message, lambda: os._exit(ExitCode.CLEAN), on_lost=gate.go_on)
    threading.Thread(target=_beat, args=(control,), name="heartbeat", daemon=True).start()
    try:
        done = jobs.run(launch, outbox.tell, gate.should_stop)
    except Refused as refused:
        outbox.fail(refused.failure)
        return exit_code(refused.failure)
    except Exception as error:
        failure = failure_of(error)
        outbox.fail(failure)
        if failure.code is ErrorCode.INTERNAL:
            raise
        return exit_code(failure)
    outbox.tell(done)
    return ExitCode.CLEAN


def _thread_failed(failed: threading.ExceptHookArgs) -> None:
    """Into the log, which the parent says again; what is only printed it keeps for itself."""
    name = failed.thread.name if failed.thread is not None else "?"
    value = failed.exc_value or failed.exc_type()
    logging.getLogger("worker").error(
        "worker.thread_failed", exc_info=value, extra={"fields": {"thread": name}}
    )


def _beat(control: Control) -> None:
    """Say once a second that this process lives, and what it has held at most; a job may be at one long step."""
    from worker.jobs.peak import peak_bytes

    while True:
        time.sleep(1.0)
        control.send(Heartbeat(WorkerStats(peak_bytes=peak_bytes())))


if __name__ == "__main__":
    main()
