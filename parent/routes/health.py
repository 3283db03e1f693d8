"""`/health` (alive, never waits), `/ready` (200 only when a model can answer), `/engine` (everything known)."""

import time
from typing import Any

import msgspec

from parent.pool.pool import Pool
from parent.pool.refusal import refusal
from parent.workers.states import State
from parent.workers.supervisor import Supervisor
from shared import asgi
from shared.version import VERSION, WIRE


class Health:
    """The three routes. Nothing here waits for a worker."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self._started_at = time.monotonic()

    async def health(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await _json(send, 200, {"status": "ok", "version": VERSION, "engine": self._first().state})

    async def ready(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        supervisor = self._first()
        is_ready = supervisor.state is State.READY and not self.pool.is_closing
        failure = refusal(supervisor)
        answer = {
            "ready": is_ready,
            "state": "closing" if self.pool.is_closing else supervisor.state,
            "model": supervisor.launch.model_id,
            "progress": supervisor.progress if supervisor.state is State.LOADING else None,
            "reason": failure.message if failure else None,
        }
        await _json(send, 200 if is_ready else 503, answer)

    async def engine(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await _json(send, 200, self.view())

    def view(self) -> dict[str, Any]:
        """What `/engine` shows and the event stream begins with."""
        supervisor = self._first()
        model = self.pool.resolve("")
        facts = supervisor.facts
        return {
            **supervisor.view(),
            "model": {
                "id": model.id,
                "aliases": model.aliases,
                "path": str(model.path),
                "bytes": model.bytes,
                "context": facts.context if facts else model.context,
            },
            "blas": facts.blas if facts else None,
            "in_flight": self.pool.outstanding(model.id),
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "closing": self.pool.is_closing,
            "version": VERSION,
            "wire": WIRE,
        }

    def _first(self) -> Supervisor:
        return self.pool.supervisors()[0]


async def _json(send: asgi.Send, status: int, payload: Any) -> None:
    await asgi.respond(send, status, msgspec.json.encode(payload), [(b"cache-control", b"no-store")])
