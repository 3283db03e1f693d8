"""Ollama's `POST /api/chat` and `POST /api/generate` as wire formats. Pure.

Their lines say the time, so that each request has a protocol of its own, with its clock.
"""

from functools import partial

from parent.protocols.base import Protocol
from parent.protocols.ollama.answer import Clock, Line, LineStream, answer, chat_line, generate_line
from parent.protocols.ollama.errors import error
from parent.protocols.ollama.request import decode_chat, decode_generate

MEDIA_TYPE = b"application/x-ndjson"
VERSION = "0.40.0"
"""Of Ollama, whose formats these are: clients look there for what a server can do."""


def chat(clock: Clock) -> Protocol:
    """`/api/chat`."""
    return _protocol("ollama_chat", "/api/chat", chat_line, clock)


def generate(clock: Clock) -> Protocol:
    """`/api/generate`."""
    return _protocol("ollama_generate", "/api/generate", generate_line, clock)


def _protocol(name: str, path: str, line: Line, clock: Clock) -> Protocol:
    return Protocol(
        name,
        path,
        decode_chat if line is chat_line else decode_generate,
        lambda meta: LineStream(meta, line, clock),
        partial(answer, line=line, clock=clock),
        error,
        media_type=MEDIA_TYPE,
        has_comments=False,
    )
