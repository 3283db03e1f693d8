"""One handler for all of `parent/protocols`: decode, resolve the model, forward, reply."""

import asyncio
import hashlib
import secrets
import time
import uuid

from parent.config import Settings
from parent.inference.forward import Forwarder, Order
from parent.inference.profiles import apply
from parent.inference.record import Record
from parent.inference.reply import Emit, send_answer, send_failure, send_stream
from parent.library.catalog import ModelEntry
from parent.protocols.base import Manners, Meta, Protocol
from shared import asgi
from shared.errors import Refused
from shared.version import VERSION

DECODE_HERE = 64 * 1024  # bytes; a longer body is decoded in a thread, beside the loop


class InferenceRoute:
    """The ASGI app of one protocol."""

    def __init__(self, protocol: Protocol, forwarder: Forwarder) -> None:
        self.protocol = protocol
        self.forwarder = forwarder

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        record = Record()
        try:
            await self._answer(scope, receive, send, record)
        except asgi.ClientGone:
            record.end = "left"
            raise
        finally:
            record.write()

    async def _answer(
        self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send, record: Record
    ) -> None:
        protocol, settings = self.protocol, self.forwarder.pool.settings
        manners = manners_of(settings)
        try:
            body = await asgi.read_body(
                receive,
                settings.max_body_bytes,
                declared=declared_length(scope),
                silence_s=settings.request_wait_s,
            )
            if len(body) <= DECODE_HERE:
                asked = protocol.decode(body, manners)
            else:
                asked = await asyncio.to_thread(protocol.decode, body, manners)
            del body
            found = await self.forwarder.pool.roster.choose(asked.model)
        except Refused as refused:
            record.end = refused.failure.code
            await send_failure(send, protocol, refused.failure)
            return
        record.model, record.stream = found.entry.id, asked.stream
        named = asked.model if asked.model and not found.is_fallback else found.entry.id
        headers = [(b"x-mlxd-fallback", found.entry.id.encode())] if found.is_fallback else []
        asked = apply(asked, found.profile)
        meta = Meta(uuid.uuid4().hex, int(time.time()), named, asked, manners, fingerprint_of(found.entry))
        requests = asked.to_generate(scope["request_id"], secrets.randbits(63))
        order = Order(found.entry, client_of(scope), asked.keep_alive_s)

        async def forward(emit: Emit) -> None:
            try:
                await self.forwarder.forward_all(order, requests, emit, record)
            except Refused as refused:
                record.end = refused.failure.code
                raise

        async def work() -> None:
            if asked.stream:
                await send_stream(
                    send,
                    scope["body_send"],
                    protocol,
                    meta,
                    forward,
                    keepalive_s=settings.keepalive_s,
                    status=record.status,
                    headers=headers,
                )
            else:
                await send_answer(send, protocol, meta, forward, headers)

        if not await asgi.run_until_gone(receive, work) and record.finish is None:
            record.end = "left"


def manners_of(settings: Settings) -> Manners:
    """How answers are written."""
    names = ("reasoning_content", "reasoning")
    shown = names if settings.reasoning_field == "both" else (settings.reasoning_field,)
    return Manners(settings.strict, shown)


def fingerprint_of(entry: ModelEntry) -> str:
    """Another one when the model's files or the server are."""
    return "fp_" + hashlib.blake2b(f"{entry.signature} {VERSION}".encode(), digest_size=5).hexdigest()


def client_of(scope: asgi.Scope) -> str:
    """Who asks, for fairness between clients: a hash of the key they send, else their address."""
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-api-key"):
            return hashlib.blake2b(value, digest_size=8).hexdigest()
    return str((scope.get("client") or ("",))[0])


def declared_length(scope: asgi.Scope) -> int | None:
    """`content-length`, where the client sent a number."""
    value = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
    return int(value) if value.isdigit() else None
