"""The places of jobs in the machine's memory: asked for here, given by the planner, told to the queue of jobs."""

import time
from collections.abc import Callable

from parent.pool.desk import Berth, Desk
from shared.errors import ErrorCode, Failure
from shared.units import format_bytes

SLACK_BYTES = 64 << 20  # what a job holds may move so far before the planner looks again


class Berths:
    """`on_placed` is told which job may begin, `on_displaced` which one has to make room. Ask; leave in any case."""

    def __init__(self, desk: Desk, replan: Callable[[], None]) -> None:
        self.on_placed: Callable[[str], None] = lambda job: None
        self.on_displaced: Callable[[str], None] = lambda job: None
        self._desk = desk
        self._replan = replan

    def ask(self, job: str, need: int, *, may_leave: bool) -> str:
        """Have a place, or wait for one: why, in a few words; "" = the job may begin. Asked again, it says so again."""
        berth = self._desk.berths.get(job)
        if berth is None:
            berth = Berth(job, need, time.monotonic(), may_leave=may_leave)
            self._desk.berths[job] = berth
            self._replan()
        return "" if berth.is_placed else berth.waits_for or "its turn"

    def adopt(self, job: str, need: int, measured: int, *, may_leave: bool) -> None:
        """A job that runs already has its place, whether it fits or not."""
        berth = Berth(job, need, time.monotonic(), may_leave=may_leave)
        berth.is_placed = True
        self._desk.berths[job] = berth
        if self._desk.policy.jobs_run == "exclusive":
            self._desk.closed_for = job
        self._desk.ledger.adopt(job, need, measured, kind="job")
        self._replan()

    def leave(self, job: str) -> None:
        """The job has ended, or waits no more; twice does no harm."""
        if self._desk.berths.pop(job, None) is None:
            return
        if self._desk.closed_for == job:
            self._desk.closed_for = ""
        self._desk.ledger.release(job)
        self._replan()

    def measure(self, job: str, held: int) -> None:
        """What its process was seen to hold."""
        account = self._desk.ledger.accounts.get(job)
        if account is None:
            return
        before = account.held
        self._desk.ledger.measure(job, held)
        if abs(account.held - before) > SLACK_BYTES:
            self._replan()

    def placed(self, job: str) -> None:
        self.on_placed(job)

    def displaced(self, job: str) -> None:
        self.on_displaced(job)

    def never_fits(self, need: int) -> Failure | None:
        """The refusal, with the numbers, of a job for which not even an otherwise empty machine would do."""
        room = max(0, self._desk.ledger.usable - self._desk.pinned_bytes())
        if need <= room:
            return None
        return Failure(
            ErrorCode.CANNOT_FIT,
            f"the job needs {format_bytes(need)} and can have at most {format_bytes(room)} (memory_budget_bytes, less "
            "pinned models and what did not come back); make it smaller",
        )
