"""`GET /api/dataset/templates`: the templates of data sets with their fields. No worker has to live for it."""

import msgspec

from shared import asgi
from shared.lab_templates import TEMPLATES, Template


class TemplateList(msgspec.Struct, frozen=True):
    """The answer."""

    templates: list[Template]


class DatasetRoutes:
    """The routes of data sets but for their submission."""

    def __init__(self) -> None:
        self._templates = msgspec.json.encode(TemplateList(list(TEMPLATES.values())))

    async def templates(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await asgi.respond(send, 200, self._templates)
