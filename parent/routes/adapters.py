"""`/v1/adapters`: what can be mounted and what is, and both by hand; a request that names one needs none of it.

`/api/finetune/merge` and `/export`: one adapter out of two, and one as a folder to give away.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from parent.bodies import read_json
from parent.config import Settings
from parent.jobs.run import run_job
from parent.library.adapters import Shelved, adapters_dir
from parent.library.catalog import ModelEntry
from parent.library.export import Manifest, export_adapter
from parent.pool.host import Host
from parent.pool.pool import Pool
from parent.workers.client import WorkerLost
from shared import asgi
from shared.errors import ErrorCode, refuse
from shared.lab import MergeAdapters

MOST_BYTES = 64 * 1024
TRIES = 3  # on so many workers, should they die meanwhile
T = TypeVar("T", bound=msgspec.Struct)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class MountBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/adapters/mount`: an adapter by its name, or the path of its folder below a folder of adapters."""

    model: str = ""
    adapter: str = ""
    path: str = ""


class UnmountBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /v1/adapters/unmount`."""

    adapter: str
    model: str = ""


class MergeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /api/finetune/merge`: names, or paths below a folder of adapters. `name`: of what is made."""

    adapter_a: str
    adapter_b: str
    scales: list[float] = []
    name: str = ""


class ExportBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`POST /api/finetune/export`."""

    base_model: str
    adapter_path: str
    method: str = ""


class AvailableAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter on disk. `mounted` and `compatible`: ids of models. `error`: why it cannot be mounted."""

    id: str
    path: str
    kind: str = ""
    rank: int = 0
    scale: float = 0.0
    base_model: str = ""
    modules: int = 0
    size_bytes: int = 0
    mounted: list[str] = []
    compatible: list[str] = []
    error: str = ""


class MountedRow(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter in memory. `in_use`: by so many requests."""

    id: str
    model: str
    path: str
    kind: str = ""
    rank: int = 0
    scale: float = 0.0
    mounted_layers: int = 0
    ram_bytes: int = 0
    in_use: int = 0


class AdapterList(msgspec.Struct, frozen=True):
    """`GET /v1/adapters`."""

    adapters: list[MountedRow]
    available: list[AvailableAdapter]


class AvailableList(msgspec.Struct, frozen=True):
    """`GET /v1/adapters/available`."""

    adapters: list[AvailableAdapter]


class Unmounted(msgspec.Struct, frozen=True):
    """The answer of `unmount`: what was let go, and the models that had it."""

    id: str
    models: list[str]


class MergeStats(msgspec.Struct, frozen=True):
    """What a merge made."""

    modules: int
    rank: int
    size_bytes: int


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/api/finetune/merge`."""

    ok: bool = True
    merged_path: str
    stats: MergeStats


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/api/finetune/export`."""

    ok: bool = True
    export_path: str
    manifest: Manifest


class AdapterRoutes:
    """The routes. `settings` gives those in force now; `worker_command`, `worker_env`: of a merge's worker."""

    def __init__(
        self,
        pool: Pool,
        settings: Callable[[], Settings],
        *,
        worker_command: list[str] | None = None,
        worker_env: dict[str, str] | None = None,
    ) -> None:
        self.pool = pool
        self.settings = settings
        self._command, self._env = worker_command, worker_env

    # ------------------------------------------------------------ what there is

    async def all(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """What is mounted, and what is on disk."""
        entries = await self._entries(scope)
        chosen = {entry.id for entry in entries}
        rows = [
            _mounted(host, key)
            for host in self.pool.roster.hosts.values()
            for key in host.adapters
            if host.entry.id in chosen
        ]
        available = await asyncio.to_thread(self._available, entries)
        await asgi.respond(send, 200, msgspec.json.encode(AdapterList(rows, available)))

    async def available(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """What is on disk, of all models or of one `?model=`."""
        entries = await self._entries(scope)
        rows = await asyncio.to_thread(self._available, entries)
        if len(entries) == 1 and parse_qs(scope["query_string"].decode("latin-1")).get("model"):
            rows = [row for row in rows if row.compatible]
        await asgi.respond(send, 200, msgspec.json.encode(AvailableList(rows)))

    async def _entries(self, scope: asgi.Scope) -> list[ModelEntry]:
        await self.pool.look()
        name = parse_qs(scope["query_string"].decode("latin-1")).get("model", [""])[-1]
        if name:
            return [(await self.pool.roster.known(name)).entry]
        return [entry for entry in self.pool.roster.library.entries if not entry.error]

    def _available(self, entries: list[ModelEntry]) -> list[AvailableAdapter]:
        library, hosts = self.pool.roster.library, dict(self.pool.roster.hosts)
        fitting = {
            entry.id: {one.id for one in library.adapters_of(entry)}
            for entry in entries
            if entry.kind == "chat"
        }
        held = {model: {mount.id for mount in list(host.adapters.values())} for model, host in hosts.items()}
        return [
            _shown(
                one,
                mounted=[model for model in held if one.id in held[model]],
                compatible=[model for model in fitting if one.id in fitting[model]],
            )
            for one in library.shelf.entries
        ]

    # ------------------------------------------------------------ by hand

    async def mount(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Load the model if need be, and mount the adapter. 200 once it is held."""
        body = await self._body(receive, MountBody)
        if bool(body.adapter) == bool(body.path):
            raise refuse(ErrorCode.INVALID_REQUEST, "give adapter or path, one of them", param="adapter")
        await self.pool.look()
        library = self.pool.roster.library
        name = library.shelf.at(body.path).id if body.path else body.adapter
        choice = await self.pool.roster.choose(body.model)
        [one] = library.adapters(choice.entry, [name])
        answer: list[MountedRow] = []

        async def work() -> None:
            lease = self.pool.ask(choice.entry)
            try:
                for tries_left in reversed(range(TRIES)):
                    client = await lease.grant()
                    try:
                        with self.pool.mounts.using(lease.host, [one]):
                            await self.pool.mounts.ready(lease.host, client, [one])
                        answer.append(_mounted(lease.host, one.key))
                        break
                    except WorkerLost as lost:
                        if not tries_left:
                            raise refuse(
                                ErrorCode.ENGINE_UNAVAILABLE,
                                f"the worker died {TRIES} times while it mounted {one.id}",
                            ) from lost
            finally:
                lease.release()
            await asgi.respond(send, 200, msgspec.json.encode(answer[0]))

        await asgi.run_until_gone(receive, work)

    async def unmount(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Let it go, of one model or of all that have it; requests that run with it come to their end."""
        body = await self._body(receive, UnmountBody)
        hosts = list(self.pool.roster.hosts.values())
        if body.model:
            entry = (await self.pool.roster.known(body.model)).entry
            hosts = [host for host in hosts if host.entry.id == entry.id]
        gone = []
        for host in hosts:
            for key in [key for key, mount in host.adapters.items() if mount.id == body.adapter]:
                with contextlib.suppress(WorkerLost):  # it went with its worker
                    await self.pool.mounts.unmount(host, key)
                gone.append(host.entry.id)
        if not gone:
            raise refuse(
                ErrorCode.NOT_FOUND, f"adapter {body.adapter[:80]!r} is not mounted", param="adapter"
            )
        self.pool.replan()
        await asgi.respond(send, 200, msgspec.json.encode(Unmounted(body.adapter, gone)))

    # ------------------------------------------------------------ merge, export

    async def merge(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """One adapter out of two, each with its factor."""
        body = await self._body(receive, MergeBody)
        await self.pool.look()
        both = [self._named(each) for each in (body.adapter_a, body.adapter_b)]
        name = body.name or "-".join(one.id.rpartition("/")[2] for one in both)
        if not _NAME.fullmatch(name):
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"{name[:80]!r} cannot be an adapter's name; use letters, digits, '.', '-' and '_'",
                param="name",
            )
        output = adapters_dir(self.settings().data_dir) / name
        if output.exists():
            raise refuse(ErrorCode.CONFLICT, f"{output} exists; choose another name", param="name")
        spec = MergeAdapters(adapters=[str(one.path) for one in both], factors=body.scales)

        async def work() -> None:
            await run_job(spec, output, worker_command=self._command, worker_env=self._env)
            await self.pool.look()
            made = self._named(str(output))
            assert made.adapter is not None
            stats = MergeStats(len(made.adapter.modules), made.adapter.rank, made.adapter.num_bytes)
            await asgi.respond(send, 200, msgspec.json.encode(Merged(merged_path=str(output), stats=stats)))

        await asgi.run_until_gone(receive, work)

    async def export(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Its files and a manifest in a folder of their own."""
        body = await self._body(receive, ExportBody)
        await self.pool.look()
        one = self._named(body.adapter_path)
        entry = (await self.pool.roster.known(body.base_model)).entry
        if problem := self.pool.roster.library.shelf.misfit(one, entry, self.pool.roster.library.model_of):
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"adapter {one.id} is not one of {entry.id}: {problem}",
                param="adapter_path",
            )
        folder = self.settings().data_dir / "exports" / one.id.replace("/", "-")
        manifest = await asyncio.to_thread(export_adapter, one, entry.id, folder, body.method)
        answer = Exported(export_path=str(folder), manifest=manifest)
        await asgi.respond(send, 200, msgspec.json.encode(answer))

    def _named(self, name: str) -> Shelved:
        """An adapter by its name, or the path of its folder. Raises `Refused`."""
        shelf = self.pool.roster.library.shelf
        for one in shelf.entries:
            if one.id == name:
                return one
        if name.startswith(("/", "~")):
            return shelf.at(name)
        ids = ", ".join(one.id for one in shelf.entries[:10]) or "none"
        raise refuse(
            ErrorCode.MODEL_NOT_FOUND, f"there is no adapter {name[:80]!r}; there is {ids}", param="adapter"
        )

    async def _body(self, receive: asgi.Receive, kind: type[T]) -> T:
        """A small JSON body. Raises `Refused`."""
        return await read_json(receive, kind, MOST_BYTES, silence_s=self.settings().request_wait_s)


def _mounted(host: Host, key: str) -> MountedRow:
    mount, client = host.adapters[key], host.supervisor.client
    held: Any = client.mounted.get(key) if client is not None else None
    told = {} if held is None else {"kind": held.kind, "rank": held.rank, "scale": held.scale}
    return MountedRow(
        id=mount.id,
        model=host.entry.id,
        path=str(mount.path),
        mounted_layers=held.modules if held is not None else 0,
        ram_bytes=mount.num_bytes,
        in_use=max(0, host.adapter_users[key]),
        **told,
    )


def _shown(one: Shelved, mounted: list[str], compatible: list[str]) -> AvailableAdapter:
    if one.adapter is None:
        return AvailableAdapter(id=one.id, path=str(one.path), error=one.error)
    return AvailableAdapter(
        id=one.id,
        path=str(one.path),
        kind=one.adapter.kind,
        rank=one.adapter.rank,
        scale=one.adapter.scale,
        base_model=next(iter(one.adapter.base_models), ""),
        modules=len(one.adapter.modules),
        size_bytes=one.adapter.num_bytes,
        mounted=mounted,
        compatible=compatible,
    )
