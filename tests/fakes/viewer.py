"""The data set viewer of the hub, as far as imports ask it: `with Viewer(rows) as viewer:`."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.fakes.loopback import Loopback


class Viewer:
    """One data set `org/set` with a configuration `plain` and a split `train`. `truncated`: cells by row."""

    def __init__(self, rows: list[dict[str, Any]], token: str = "") -> None:
        self.rows, self.token = rows, token
        self.truncated: dict[int, list[str]] = {}
        self.statuses: list[tuple[int, dict[str, str]]] = []
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.url = ""

    def __enter__(self) -> "Viewer":
        routes = [Route("/rows", self._rows), Route("/splits", self._splits)]
        self._server = Loopback(routes)
        self.url = self._server.url
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()

    def _refused(self, request: Request) -> Response | None:
        query = dict(request.query_params)
        self.asked.append((request.url.path, query))
        if self.statuses:
            status, headers = self.statuses.pop(0)
            return JSONResponse({"error": f"status {status}"}, status, headers)
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return JSONResponse({"error": "The dataset is gated."}, 401)
        if query.get("dataset") != "org/set":
            return JSONResponse({"error": "The dataset does not exist."}, 404)
        return None

    async def _splits(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        split = {"dataset": "org/set", "config": "plain", "split": "train"}
        return JSONResponse({"splits": [split], "pending": [], "failed": []})

    async def _rows(self, request: Request) -> Response:
        if (refused := self._refused(request)) is not None:
            return refused
        query = request.query_params
        offset, length = int(query["offset"]), int(query["length"])
        assert length <= 100, "the viewer gives no more"
        shown = [
            {
                "row_idx": number,
                "row": self.rows[number],
                "truncated_cells": self.truncated.get(number, []),
            }
            for number in range(offset, min(offset + length, len(self.rows)))
        ]
        features = [
            {"feature_idx": place, "name": name, "type": {"dtype": "string", "_type": "Value"}}
            for place, name in enumerate(self.rows[0] if self.rows else {})
        ]
        return JSONResponse(
            {
                "features": features,
                "rows": shown,
                "num_rows_total": len(self.rows),
                "num_rows_per_page": 100,
                "partial": False,
            }
        )
