"""`/` and `/static/…`: the packaged files of the page and nothing else; paths are looked up, never joined."""

import hashlib
from pathlib import Path

from shared import asgi
from shared.errors import ErrorCode, refuse

FOLDER = Path(__file__).resolve().parents[1] / "static"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".ico": b"image/x-icon",
    ".json": b"application/json",
    ".webmanifest": b"application/manifest+json",
    ".woff2": b"font/woff2",
}
_SECURITY = [
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # with an ETag: asked again, answered with 304
]


class Static:
    """Serves the files found in `folder` at start, read anew for each request."""

    def __init__(self, folder: Path = FOLDER) -> None:
        files = (path for path in folder.rglob("*") if path.suffix in _TYPES and path.is_file())
        self._files = {path.relative_to(folder).as_posix(): path for path in files}

    async def page(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._send(scope, send, "index.html")

    async def file(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await self._send(scope, send, scope["path_params"]["name"])

    async def _send(self, scope: asgi.Scope, send: asgi.Send, name: str) -> None:
        path = self._files.get(name)
        if path is None:
            raise refuse(ErrorCode.NOT_FOUND, f"there is no file {name!r} in this server's pages")
        body = path.read_bytes()
        etag = b'"%b"' % hashlib.blake2b(body, digest_size=12).hexdigest().encode()
        headers = [(b"etag", etag), *_SECURITY]
        asked = next((value for header, value in scope["headers"] if header == b"if-none-match"), b"")
        if etag in asked:
            await asgi.start(send, 304, headers)
            await asgi.send_chunk(send, b"", more=False)
            return
        await asgi.respond(send, 200, body, [(b"content-type", _TYPES[path.suffix]), *headers])
