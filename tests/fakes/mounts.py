"""Adapters of the fake worker: held by name alone; a path with `broken` in it is refused."""

from collections.abc import Callable

import msgspec

from shared import asgi, wire
from shared.errors import ErrorCode, Failure


async def answer(
    mounted: dict[str, wire.MountedAdapter],
    method: str,
    body: bytes,
    send: asgi.Send,
    journal: Callable[..., None],
) -> None:
    """Every method of `/adapters`."""
    if method == "POST":
        asked = msgspec.json.decode(body, type=wire.MountRequest)
        journal("mount", key=asked.key)
        if "broken" in asked.path:
            failure = Failure(ErrorCode.INVALID_REQUEST, "refused as told: broken", "adapter")
            await asgi.respond(send, 400, msgspec.json.encode(failure))
            return
        mounted[asked.key] = wire.MountedAdapter(
            key=asked.key, path=asked.path, kind="lora", rank=4, scale=1.0, modules=2, num_bytes=4096
        )
    elif method == "DELETE":
        key = msgspec.json.decode(body, type=wire.UnmountRequest).key
        journal("unmount", key=key)
        mounted.pop(key, None)
    await asgi.respond(send, 200, msgspec.json.encode(wire.Mounts(list(mounted.values()))))
