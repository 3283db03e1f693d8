"""One handler for all of `parent/protocols`: decode, resolve the model, forward, reply."""

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec

from parent.config import Settings
from parent.inference.forward import Forwarder, Order
from parent.inference.profiles import apply
from parent.inference.record import Record
from parent.inference.reply import Emit, send_answer, send_failure, send_stream
from parent.library.catalog import ModelEntry
from parent.pool.refusal import not_for
from parent.protocols.base import DecodedRequest, Manners, Meta, Protocol
from shared import asgi, wire
from shared.errors import Refused
from shared.version import VERSION

DECODE_HERE = 64 * 1024  # bytes; a longer body is decoded in a thread, beside the loop
T = TypeVar("T")


class InferenceRoute:
    """The ASGI app of one protocol."""

    def __init__(self, protocol: Protocol, forwarder: Forwarder) -> None:
        self.protocol = protocol
        self.forwarder = forwarder

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self.answer(scope, receive, send)

    async def answer(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        asked: DecodedRequest | None = None,
    ) -> None:
        """`asked`: where the body has been read already."""
        record = Record()
        try:
            await self._answer(scope, receive, send, asked, record)
        except asgi.ClientGone:
            record.end = "left"
            raise
        finally:
            record.write()

    async def _answer(
        self,
        scope: asgi.Scope,
        receive: asgi.Receive,
        send: asgi.Send,
        given: DecodedRequest | None,
        record: Record,
    ) -> None:
        protocol, forwarder = self.protocol, self.forwarder
        try:
            asked = (
                given
                if given is not None
                else await read(scope, receive, forwarder.pool.settings, protocol.decode)
            )
            admitted = await admit(scope, asked, forwarder, record)
        except Refused as refused:
            record.end = refused.failure.code
            await send_failure(send, protocol, refused.failure, scope["request_id"])
            return

        async def forward(emit: Emit) -> None:
            await forwarded(forwarder, admitted, emit, record)

        async def work() -> None:
            if asked.stream:
                await send_stream(
                    send,
                    scope["body_send"],
                    protocol,
                    admitted.meta,
                    forward,
                    keepalive_s=forwarder.pool.settings.keepalive_s,
                    status=record.status,
                    headers=admitted.headers,
                )
            else:
                await send_answer(send, protocol, admitted.meta, forward, admitted.headers)

        if not await asgi.run_until_gone(receive, work) and record.finish is None:
            record.end = "left"


class Admitted(NamedTuple):
    """A request that has its model. `headers`: of the answer."""

    meta: Meta
    requests: list[wire.GenerateRequest]
    order: Order
    headers: list[tuple[bytes, bytes]]


async def read(
    scope: asgi.Scope, receive: asgi.Receive, settings: Settings, decode: Callable[[bytes, Manners], T]
) -> T:
    """The body, decoded. Raises `Refused`."""
    body = await asgi.read_body(
        receive,
        settings.max_body_bytes,
        declared=declared_length(scope),
        silence_s=settings.request_wait_s,
    )
    if len(body) <= DECODE_HERE:
        return decode(body, manners_of(settings))
    return await asyncio.to_thread(decode, body, manners_of(settings))


async def admit(scope: asgi.Scope, asked: DecodedRequest, forwarder: Forwarder, record: Record) -> Admitted:
    """Choose the model, and apply its profile. Raises `Refused`."""
    pool = forwarder.pool
    found = await pool.roster.choose(asked.model)
    record.model, record.stream = found.entry.id, asked.stream
    if found.entry.kind != "chat":
        raise not_for(found.entry, "and does not write")
    adapters = await pool.roster.adapters(found, asked.adapter)
    named = asked.model if asked.model and not found.is_fallback else found.entry.id
    if adapters and not found.adapters and found.profile is None:
        named += f":{'+'.join(one.id for one in adapters)}"
    headers = [(b"x-mlxd-fallback", found.entry.id.encode())] if found.is_fallback else []
    asked = apply(asked, found.profile)
    fingerprint = fingerprint_of(found.entry, *(one.signature for one in adapters))
    request_id, manners = scope["request_id"], manners_of(pool.settings)
    meta = Meta(uuid.uuid4().hex, int(time.time()), named, asked, manners, fingerprint, request_id)
    requests = asked.to_generate(request_id, secrets.randbits(63))
    if adapters:
        keys = [one.key for one in adapters]
        requests = [msgspec.structs.replace(each, adapters=keys) for each in requests]
    order = Order(found.entry, client_of(scope), asked.keep_alive_s, adapters)
    return Admitted(meta, requests, order, headers)


async def forwarded(forwarder: Forwarder, admitted: Admitted, emit: Emit, record: Record) -> None:
    """Hand the events of its answers to `emit`; what it is refused for stands in the record."""
    try:
        await forwarder.forward_all(admitted.order, admitted.requests, emit, record)
    except Refused as refused:
        record.end = refused.failure.code
        raise


def manners_of(settings: Settings) -> Manners:
    """How answers are written."""
    names = ("reasoning_content", "reasoning")
    shown = names if settings.reasoning_field == "both" else (settings.reasoning_field,)
    return Manners(settings.strict, shown)


def fingerprint_of(entry: ModelEntry, *adapters: str) -> str:
    """Another one when the model's files, those of its adapters (their signatures), or the server are."""
    parts = " ".join((entry.signature, VERSION, *adapters))
    return "fp_" + hashlib.blake2b(parts.encode(), digest_size=5).hexdigest()


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
