"""`/health` (alive, never waits), `/ready` (200 only when the default model can answer), `/engine`, `/running`."""

import time
from typing import Any

import msgspec

from parent.inference.history import History
from parent.pool.desk import FOREVER, Phase
from parent.pool.host import Host
from parent.pool.pool import Pool
from parent.pool.refusal import refusal
from parent.workers.states import State
from shared import asgi
from shared.version import VERSION, WIRE


class Health:
    """The four routes. Nothing here waits for a worker. `boot` names this run of the server."""

    def __init__(self, pool: Pool, boot: str, history: History) -> None:
        self.pool = pool
        self.boot = boot
        self.history = history
        self._started_at = time.monotonic()

    async def health(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        host = self._first()
        state = host.supervisor.state if host else State.ABSENT
        await _json(send, 200, {"status": "ok", "version": VERSION, "boot": self.boot, "engine": state})

    async def ready(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        host = self._first()
        closing = self.pool.is_closing
        is_ready = host is not None and host.slot.phase is Phase.READY and not closing
        answer: dict[str, Any] = {
            "ready": is_ready,
            "state": "closing" if closing else host.supervisor.state if host else State.ABSENT,
            "model": host.entry.id if host else None,
            "progress": None,
            "reason": None,
        }
        if host is not None:
            failure = refusal(host.supervisor)
            answer["progress"] = host.supervisor.progress if host.supervisor.state is State.LOADING else None
            answer["reason"] = failure.message if failure else None
        await _json(send, 200 if is_ready else 503, answer)

    async def engine(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await _json(send, 200, {**self.view(), "response_store": await self.history.stats()})

    async def running(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """The models in memory or on their way, with what they hold and how busy they are."""
        present = [host for host in self.pool.roster.hosts.values() if host.slot.phase is not Phase.ABSENT]
        await _json(send, 200, {"models": [self._row(host) for host in present]})

    def view(self) -> dict[str, Any]:
        """What `/engine` shows and the event stream begins with: the default model's worker, then all."""
        pool, host = self.pool, self._first()
        view: dict[str, Any] = {"state": State.ABSENT, "model": None, "pid": None}
        if host is not None:
            facts = host.supervisor.facts
            view = {
                **host.supervisor.view(),
                "model": {
                    "id": host.entry.id,
                    "aliases": host.entry.aliases,
                    "path": str(host.entry.path),
                    "bytes": host.entry.bytes,
                    "context": facts.context if facts else host.entry.context,
                },
                "blas": facts.blas if facts else None,
                "in_flight": pool.outstanding(host.entry.id),
            }
        return {
            **view,
            "workers": [self._row(each) for each in pool.roster.hosts.values()],
            "ledger": pool.desk.ledger.view(),
            "waiting": pool.desk.num_waiting,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "closing": pool.is_closing,
            "version": VERSION,
            "wire": WIRE,
            "boot": self.boot,
        }

    def queue(self) -> dict[str, Any]:
        """Who waits and who runs, by model; the `queue` event."""
        slots = self.pool.desk.slots.values()
        return {
            "waiting": self.pool.desk.num_waiting,
            "models": {
                slot.model: {"running": len(slot.granted), "waiting": len(slot.waiting), "phase": slot.phase}
                for slot in slots
            },
        }

    def _row(self, host: Host) -> dict[str, Any]:
        slot, supervisor, now = host.slot, host.supervisor, time.monotonic()
        account = self.pool.desk.ledger.accounts.get(slot.account)
        idle_end = slot.last_used + slot.keep_alive_s
        expires = slot.phase is Phase.READY and not slot.granted and idle_end != FOREVER
        return {
            **supervisor.view(),
            "path": str(host.entry.path),
            "phase": slot.phase,
            "pinned": slot.is_pinned,
            "running": len(slot.granted),
            "waiting": len(slot.waiting),
            "rows": slot.room,
            "reserved_bytes": account.reserved if account else 0,
            "held_bytes": account.held if account else 0,
            "expires_in_s": round(max(0.0, idle_end - now), 3) if expires else None,
            "load_cost_s": round(slot.load_cost_s, 3),
            "successor": host.successor.state if host.successor else None,
            "leaving": len(host.leaving),
            "rollout": host.rollout or None,
        }

    def _first(self) -> Host | None:
        """The default model's; where there is none, the last used."""
        hosts = self.pool.roster.hosts
        if self.pool.roster.default in hosts:
            return hosts[self.pool.roster.default]
        return max(hosts.values(), key=lambda host: host.slot.last_used, default=None)


async def _json(send: asgi.Send, status: int, payload: Any) -> None:
    await asgi.respond(send, status, msgspec.json.encode(payload), [(b"cache-control", b"no-store")])
