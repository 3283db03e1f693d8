"""One handler for all of `parent/protocols`: decode, resolve the model, forward, reply."""

import asyncio
import secrets
import time
import uuid
from functools import partial

from parent.config import Settings
from parent.inference.forward import Forwarder
from parent.inference.reply import send_answer, send_failure, send_stream
from parent.protocols.base import Meta, Protocol
from shared import asgi
from shared.errors import Refused

DECODE_HERE = 64 * 1024  # bytes; a longer body is decoded in a thread, beside the loop


class InferenceRoute:
    """The ASGI app of one protocol."""

    def __init__(self, protocol: Protocol, forwarder: Forwarder, settings: Settings) -> None:
        self.protocol = protocol
        self.forwarder = forwarder
        self.settings = settings

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        protocol = self.protocol
        try:
            body = await asgi.read_body(
                receive, self.settings.max_body_bytes, declared=declared_length(scope)
            )
            if len(body) <= DECODE_HERE:
                asked = protocol.decode(body)
            else:
                asked = await asyncio.to_thread(protocol.decode, body)
            del body
            model = self.forwarder.pool.resolve(asked.model)
        except Refused as refused:
            await send_failure(send, protocol, refused.failure)
            return
        meta = Meta(uuid.uuid4().hex, int(time.time()), asked.model or model.id, asked.include_usage)
        request = asked.to_generate(scope["request_id"], secrets.randbits(63))

        async def work() -> None:
            forward = partial(self.forwarder.forward, model, request)
            if asked.stream:
                await send_stream(
                    send, scope["body_send"], protocol, meta, forward, self.settings.keepalive_s
                )
            else:
                await send_answer(send, protocol, meta, forward)

        await asgi.run_until_gone(receive, work)


def declared_length(scope: asgi.Scope) -> int | None:
    """`content-length`, where the client sent a number."""
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(value) if value.isdigit() else None
