"""Operators' routes for the disk and the hub: what of the Hugging Face cache may go, and the token for the hub."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from parent.bodies import read_json
from parent.config import Settings
from parent.jobs.queue import JobQueue
from parent.jobs.states import ACTIVE, State
from parent.library.hf_cache import cache_dir
from parent.library.hub_token import HubToken
from parent.library.pruning import RepoPlan, execute, plan
from parent.model_options import ModelOptions
from parent.pool.desk import Phase
from parent.pool.pool import Pool
from shared import asgi
from shared.errors import ErrorCode, refuse

MOST_BYTES = 16 * 1024


class TokenBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /api/settings/hf-token`."""

    token: str


class TokenState(msgspec.Struct, frozen=True, rename={"has_token": "hasToken"}):
    """Whether there is one; it is told to nobody."""

    ok: bool
    has_token: bool


class ExecuteBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /api/gc/execute`."""

    yes: bool = False


class GcPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What could go."""

    ok: bool = True
    superseded: list[RepoPlan]
    reclaim_bytes: int


class GcDone(msgspec.Struct, frozen=True, kw_only=True):
    """What went."""

    ok: bool = True
    snapshots: int
    blobs: int
    reclaimed_bytes: int


class Storage:
    """The routes. `on_token` is told that the token is another one."""

    def __init__(
        self,
        pool: Pool,
        queue: JobQueue,
        settings: Callable[[], Settings],
        token: HubToken,
        on_token: Callable[[], None],
    ) -> None:
        self.pool, self.queue, self.settings = pool, queue, settings
        self.token = token
        self._on_token = on_token
        self._one_at_a_time = asyncio.Lock()

    # ------------------------------------------------------------ token

    async def token_state(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await _answer(send, TokenState(True, self.token.has_any()))

    async def keep_token(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        body = await self._body(receive, TokenBody)
        await asyncio.to_thread(self.token.keep, body.token)
        self._on_token()
        await _answer(send, TokenState(True, True))

    async def forget_token(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Ours; one of the user's own stays."""
        self.token.forget()
        self._on_token()
        await _answer(send, TokenState(True, self.token.has_any()))

    # ------------------------------------------------------------ what may go

    async def gc_plan(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        cache = self._cache()
        await self.pool.look()
        reasons, jobs = self._reasons(), await self._jobs()

        def used(repo: str, commit: str, folder: Path) -> str:
            return _reason(folder, reasons, jobs)

        found = await asyncio.to_thread(plan, cache, used) if cache is not None else []
        total = sum(one.reclaim_bytes for one in found)
        await _answer(send, GcPlan(superseded=found, reclaim_bytes=total))

    async def gc_execute(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Nobody can take away what is being loaded: that nothing uses a snapshot is looked at in the same moment."""
        body = await self._body(receive, ExecuteBody)
        if not body.yes:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                'give {"yes": true}: what GET /api/gc/plan names is deleted for good',
                param="yes",
            )
        cache = self._cache()
        loop = asyncio.get_running_loop()

        async def aside(folder: Path, doomed: Path) -> bool:
            jobs = await self._jobs()
            if _reason(folder, self._reasons(), jobs):
                return False
            try:
                os.rename(folder, doomed)
            except OSError:
                return False
            return True

        def used(repo: str, commit: str, folder: Path) -> str:
            return ""  # `aside` decides

        async with self._one_at_a_time:
            await self.pool.look()
            removed = (0, 0, 0)
            if cache is not None:
                done = await asyncio.to_thread(
                    execute,
                    cache,
                    used,
                    lambda repo, commit, folder, doomed: asyncio.run_coroutine_threadsafe(
                        aside(folder, doomed), loop
                    ).result(),
                )
                removed = (done.snapshots, done.blobs, done.reclaimed_bytes)
                await self.pool.look()
        await _answer(send, GcDone(snapshots=removed[0], blobs=removed[1], reclaimed_bytes=removed[2]))

    def _cache(self) -> Path | None:
        return cache_dir(self.settings().hf_cache, os.environ, Path.home())

    async def _jobs(self) -> list[str]:
        """The specs of jobs that run or wait."""
        states = {State.QUEUED, State.PAUSED, *ACTIVE}
        return [job.spec for job in await self.queue.store.find(limit=-1, states=states)]

    def _reasons(self) -> dict[str, str]:
        """The real path of every model that must stay, and why."""
        roster, found = self.pool.roster, dict[str, str]()
        for entry in roster.library.entries:
            options = roster.library.options(entry.id)
            reason = ""
            if options.pin:
                reason = "pinned"
            elif options != ModelOptions():
                reason = "the settings speak of it"
            elif entry.id == roster.default:
                reason = "the default model"
            if reason:
                found[os.path.realpath(entry.path)] = reason
        for host in roster.hosts.values():
            slot = host.slot
            if slot.phase is not Phase.ABSENT or slot.waiting or slot.granted or slot.kept_since is not None:
                found[os.path.realpath(host.entry.path)] = f"in use: {slot.phase}"
                found[os.path.realpath(host.running.launch.path)] = f"in use: {slot.phase}"
        return found

    async def _body(self, receive: asgi.Receive, kind: Any) -> Any:
        return await read_json(receive, kind, MOST_BYTES, silence_s=self.settings().request_wait_s)


def _reason(folder: Path, reasons: dict[str, str], jobs: list[str]) -> str:
    real = os.path.realpath(folder)
    if real in reasons:
        return reasons[real]
    return "a job works with it" if any(str(folder) in spec or real in spec for spec in jobs) else ""


async def _answer(send: asgi.Send, found: msgspec.Struct) -> None:
    await asgi.respond(send, 200, msgspec.json.encode(found))
