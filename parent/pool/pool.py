"""The owner of all workers: who may have one, who waits, who is told that there is none.

In this version every served model has one slot, one supervisor and no byte ledger; the served model is pinned.
A request acquires a lease on a ready worker; the worker itself queues beyond its rows.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.pool.models import not_found, resolve
from parent.pool.refusal import refusal
from parent.workers import launcher
from parent.workers.client import WorkerClient
from parent.workers.states import Limits, State
from parent.workers.supervisor import Supervisor
from shared.control import LaunchModel
from shared.errors import ErrorCode, Failure, Refused, refuse

RETRY_LOADING_S = 5.0
DEATH_SHOWS_S = 1.0


class Lease:
    """The right to send one request to a ready worker. Release it in every case; twice does no harm."""

    def __init__(self, client: WorkerClient, slot: "Slot") -> None:
        self.client = client
        self._slot: Slot | None = slot

    def release(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.outstanding -= 1


class Slot:
    """One model, its supervisor, and how many requests it has to answer."""

    def __init__(self, model: ModelEntry, supervisor: Supervisor) -> None:
        self.model = model
        self.supervisor = supervisor
        self.outstanding = 0  # waiting and granted


class Pool:
    """All slots. `on_change` is told whenever a worker's state or progress moves."""

    def __init__(
        self,
        models: Sequence[ModelEntry],
        settings: Settings,
        *,
        runtime_dir: Path,
        worker_command: list[str] | None = None,
        worker_env: dict[str, str] | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.models = models
        self.settings = settings
        self.is_closing = False
        command = worker_command or launcher.default_command()
        environment = launcher.worker_environment(worker_env or {})
        limits = Limits(
            hello_s=settings.hello_s,
            load_stall_s=settings.load_stall_s,
            load_total_s=settings.load_total_s,
            drain_s=settings.drain_s,
            stop_grace_s=settings.stop_grace_s,
            half_open_s=settings.half_open_s,
            restart_budget=settings.restart_budget,
            restart_window_s=settings.restart_window_s,
        )
        self._slots = {
            model.id: Slot(
                model,
                Supervisor(
                    LaunchModel(
                        model_id=model.id,
                        path=str(model.path),
                        dtype=settings.dtype,
                        max_context=settings.max_context,
                        prefill_chunk=settings.prefill_chunk,
                        max_rows=settings.max_rows,
                        prefix_cache_bytes=settings.prefix_cache_bytes,
                    ),
                    command=command,
                    environment=environment,
                    runtime_dir=runtime_dir,
                    limits=limits,
                    heartbeat_s=settings.heartbeat_s,
                    hung_s=settings.hung_s,
                    name=f"w{number}" if number else "w",
                    on_change=on_change,
                ),
            )
            for number, model in enumerate(models)
        }

    def start(self) -> None:
        """Load what is served, without waiting for it."""
        for slot in self._slots.values():
            slot.supervisor.want()

    def supervisor(self, model_id: str) -> Supervisor:
        """The supervisor of a model. Raises `Refused` (model_not_found)."""
        if model_id not in self._slots:
            raise not_found(self.models, model_id)
        return self._slots[model_id].supervisor

    def supervisors(self) -> list[Supervisor]:
        return [slot.supervisor for slot in self._slots.values()]

    def resolve(self, name: str) -> ModelEntry:
        """A client's name to a model. Raises `Refused` (model_not_found)."""
        return resolve(self.models, name)

    def outstanding(self, model_id: str) -> int:
        """Requests that wait or run."""
        return self._slots[model_id].outstanding

    # ------------------------------------------------------------ requests

    async def acquire(self, model: ModelEntry, *, lost: WorkerClient | None = None) -> Lease:
        """A lease, as soon as the worker is ready. `lost`: the request was admitted before, and lost there.

        Raises `Refused`: queue_full, loading (the wait bound is over), engine_unavailable, shutting_down, or
        what is permanently wrong with the model.
        """
        slot = self._slots[model.id]
        limit = self.settings.queue_limit + self.settings.max_rows
        if slot.outstanding >= limit and lost is None:
            raise refuse(
                ErrorCode.QUEUE_FULL,
                f"{slot.outstanding} requests run or wait already; the limit is {limit} (setting queue_limit)",
                retry_after_s=1.0,
            )
        slot.outstanding += 1
        try:
            return Lease(await self._ready(slot, lost), slot)
        except BaseException:
            slot.outstanding -= 1
            raise

    async def _ready(self, slot: Slot, lost: WorkerClient | None) -> WorkerClient:
        supervisor = slot.supervisor
        try:
            async with asyncio.timeout(self.settings.load_wait_s):
                if lost is not None and supervisor.client is lost:
                    # A death shows on the data channel first. A worker that stays had only a connection cut.
                    await supervisor.changed(DEATH_SHOWS_S)
                while True:
                    if self.is_closing:
                        raise refuse(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
                    if supervisor.state is State.READY and supervisor.client is not None:
                        return supervisor.client
                    supervisor.want()
                    failure = refusal(supervisor)
                    if failure is not None:
                        raise Refused(failure)
                    await supervisor.changed()
        except TimeoutError:
            raise Refused(self._still_loading(slot)) from None

    def _still_loading(self, slot: Slot) -> Failure:
        progress = slot.supervisor.progress
        share = f", {progress.done * 100 // progress.total} %" if progress.total else ""
        stage = f" (stage {progress.stage}{share})" if slot.supervisor.state is State.LOADING else ""
        return Failure(
            ErrorCode.LOADING,
            f"{slot.model.id} is still {slot.supervisor.state}{stage} after {self.settings.load_wait_s:g} s",
            retry_after_s=RETRY_LOADING_S,
        )

    # ------------------------------------------------------------ operators and shutdown

    def restart(self, model_id: str) -> None:
        """Drain and start again; from failed or exhausted, start again. Raises `Refused`."""
        if self.is_closing:
            raise refuse(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        self.supervisor(model_id).restart()

    def close(self) -> None:
        """Grant nothing any more; those who wait are answered now. Requests that run go on."""
        self.is_closing = True
        for supervisor in self.supervisors():
            supervisor.wake()

    def cut(self) -> None:
        """Stop every worker now; requests that still run end with an error frame."""
        self.close()
        for supervisor in self.supervisors():
            supervisor.stop()

    async def stop(self) -> None:
        """End every worker: shutdown, TERM, KILL. Returns when no process is left."""
        self.cut()
        for supervisor in self.supervisors():
            await supervisor.absent()

    def kill(self) -> None:
        """SIGKILL every worker now; `stop` then returns at once."""
        self.close()
        for supervisor in self.supervisors():
            supervisor.kill()
