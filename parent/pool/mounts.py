"""Adapters in the workers of the pool: mounted when a request asks for one, remembered, and mounted again in the worker
that comes after.

One mount of an adapter at a time a worker; whoever else asks for it waits for that one. Their bytes stand in the
model's bill. Where they do not fit, adapters that no request runs with go first, then what the model was granted beyond
its least; then the mount is refused, with the numbers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from parent.library.adapters import Shelved
from parent.pool.desk import Desk
from parent.pool.host import Host, Mount
from parent.workers.client import EventStream, WorkerClient, WorkerLost
from shared import wire
from shared.errors import ErrorCode, Refused, refuse
from shared.logs import event
from shared.units import format_bytes

log = logging.getLogger(__name__)


class MountPoint:
    """The one place where adapters are mounted and unmounted."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def using(self, host: Host, wanted: Sequence[Shelved]) -> Iterator[None]:
        """While a request with these lives none of them is let go for want of memory."""
        keys = [one.key for one in wanted]
        host.adapter_users.update(keys)
        try:
            yield
        finally:
            host.adapter_users.subtract(keys)
            for key in keys:
                if host.adapter_users[key] <= 0:
                    del host.adapter_users[key]

    async def ready(self, host: Host, client: WorkerClient, wanted: Sequence[Shelved]) -> None:
        """Returns when the worker holds them all. Raises `Refused` (invalid_request, cannot_fit …), `WorkerLost`."""
        for one in wanted:
            if one.key not in client.mounted:
                await self._single(host, client, one.key, one.path, one)
            if (mount := host.adapters.get(one.key)) is not None:
                mount.last_used = time.monotonic()

    async def generate(
        self, host: Host, client: WorkerClient, wanted: Sequence[Shelved], request: wire.GenerateRequest
    ) -> EventStream:
        """As `WorkerClient.generate`, once the adapters are mounted; one that was let go meanwhile is mounted again."""
        for is_last in (False, True):
            await self.ready(host, client, wanted)
            try:
                return await client.generate(request)
            except Refused as refused:
                is_gone = refused.failure.code is ErrorCode.CONFLICT and refused.failure.param == "adapter"
                if is_last or not is_gone:
                    raise
                for one in wanted:
                    client.mounted.pop(one.key, None)
        raise AssertionError  # the second try returned or raised

    async def unmount(self, host: Host, key: str) -> None:
        """Let an adapter go. Raises `Refused` (not_found), `WorkerLost`."""
        mount, client = host.adapters.get(key), host.supervisor.client
        if mount is None:
            raise refuse(
                ErrorCode.NOT_FOUND, f"adapter {key.partition('@')[0]} is not mounted", param="adapter"
            )
        self._forget(host, key)
        if client is not None and client.mounted.pop(key, None) is not None:
            with contextlib.suppress(Refused):  # it knows nothing of it: all the better
                await client.unmount(key)

    def came_up(self, host: Host) -> None:
        """A worker of this model is ready: mount what the one before it had. Nobody waits for that but who needs it."""
        client = host.supervisor.client
        if client is not None:
            task = asyncio.get_running_loop().create_task(self._restore(host, client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def went(self, host: Host) -> None:
        """The model was let go: what was mounted is not remembered."""
        for key in list(host.adapters):
            self._forget(host, key)

    # ------------------------------------------------------------ mounting

    async def _single(
        self, host: Host, client: WorkerClient, key: str, path: Path, fresh: Shelved | None
    ) -> None:
        """Mount, or wait for the mount that is under way."""
        task = client.mounting.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._mount(host, client, key, path, fresh))
            client.mounting[key] = task
            task.add_done_callback(lambda done: _done(client, key, done))
        await asyncio.shield(task)

    async def _mount(
        self, host: Host, client: WorkerClient, key: str, path: Path, fresh: Shelved | None
    ) -> None:
        is_new = key not in host.adapters
        if is_new:
            dtype = host.supervisor.facts.dtype if host.supervisor.facts else ""
            await self._reserve(host, key, path, fresh.bytes_in(dtype) if fresh else 0)
        began = time.monotonic()
        try:
            [held] = [one for one in (await client.mount(key, str(path))).adapters if one.key == key]
        except BaseException as error:
            if is_new or isinstance(error, Refused):
                self._forget(host, key)
            raise
        client.mounted[key] = held
        self._count(host, key, held.num_bytes)
        event(
            log,
            "adapter.mounted",
            model=host.entry.id,
            adapter=key,
            bytes=held.num_bytes,
            seconds=round(time.monotonic() - began, 3),
        )
        for other, mount in list(host.adapters.items()):  # the same one, as it was on disk before
            if mount.id == host.adapters[key].id and other != key:
                with contextlib.suppress(Refused):
                    await self.unmount(host, other)

    async def _restore(self, host: Host, client: WorkerClient) -> None:
        try:
            for held in (await client.adapters()).adapters:  # of a worker that was adopted
                client.mounted[held.key] = held
                if held.key not in host.adapters:
                    # Its account was opened with all that the worker holds.
                    size, now = held.num_bytes, time.monotonic()
                    mount = Mount(held.key.rpartition("@")[0], Path(held.path), size, now)
                    host.adapters[held.key] = mount
                    host.slot.bill = replace(host.slot.bill, adapters=host.adapter_bytes)
            for key, mount in list(host.adapters.items()):
                if key not in client.mounted:
                    await self._single(host, client, key, mount.path, None)
        except WorkerLost:
            pass  # the next one will try
        except Refused as refused:
            event(
                log,
                "adapter.not_mounted_again",
                level=logging.WARNING,
                model=host.entry.id,
                reason=str(refused),
            )

    # ------------------------------------------------------------ bytes

    async def _reserve(self, host: Host, key: str, path: Path, size: int) -> None:
        """Take `size` bytes for an adapter into the model's account. Raises `Refused` (cannot_fit) with the numbers."""
        ledger, slot = self._desk.ledger, host.slot
        while True:
            account = ledger.accounts.get(slot.account)
            if account is None or account.grant is None:
                break  # it has none: its worker has gone
            spare = account.grant.total - account.grant.less(account.grant.total, slot.bill).total
            if size <= max(0, ledger.free) + spare:
                break
            idle = [other for other in host.adapters if other != key and not host.adapter_users[other]]
            if not idle:
                raise refuse(
                    ErrorCode.CANNOT_FIT,
                    f"adapter {key.rpartition('@')[0]} needs {format_bytes(size)} beside {host.entry.id}; "
                    f"{format_bytes(max(0, ledger.free) + spare)} are left of the budget of "
                    f"{format_bytes(ledger.budget)} (memory_budget_bytes)",
                    param="adapter",
                )
            await self.unmount(host, min(idle, key=lambda other: host.adapters[other].last_used))
        host.adapters[key] = Mount(key.rpartition("@")[0], path, 0, time.monotonic())
        self._count(host, key, size)

    def _count(self, host: Host, key: str, size: int) -> None:
        """An adapter holds so much now; what that is more or less than before changes the bill and the account."""
        mount = host.adapters[key]
        change, mount.num_bytes = size - mount.num_bytes, size
        slot, ledger = host.slot, self._desk.ledger
        slot.bill = replace(slot.bill, adapters=host.adapter_bytes)
        account = ledger.accounts.get(slot.account)
        if account is None or account.grant is None or not change:
            return
        grant = replace(account.grant, transient=max(0, account.grant.transient + change))
        if change > ledger.free:
            grant = grant.less(change - max(0, ledger.free), slot.bill)
        is_less = (grant.kv, grant.prefix) != (account.grant.kv, account.grant.prefix)
        ledger.resize(slot.account, grant)
        if is_less:
            host.supervisor.resize(grant.kv, grant.prefix)

    def _forget(self, host: Host, key: str) -> None:
        if key in host.adapters:
            self._count(host, key, 0)
            del host.adapters[key]


def _done(client: WorkerClient, key: str, task: "asyncio.Task[None]") -> None:
    client.mounting.pop(key, None)
    if not task.cancelled():
        task.exception()  # whoever waited has been told
