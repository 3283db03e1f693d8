"""`GET /openapi.json`, and `GET /v1`, which says what there is."""

from collections.abc import Callable

from shared import asgi


class OpenApi:
    """The routes. `document` and `index` give JSON."""

    def __init__(self, document: Callable[[], bytes], index: Callable[[], bytes]) -> None:
        self.document = document
        self.index = index

    async def whole(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`GET /openapi.json`."""
        await asgi.respond(send, 200, self.document())

    async def under(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """`GET /v1`."""
        await asgi.respond(send, 200, self.index())
