"""What the fake hub does for those who push: repositories are made, large files stored by their hash, commits taken."""

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

if TYPE_CHECKING:
    from tests.fakes.hub import Hub

LARGE = 1000
"""Bytes from which on a file is stored with LFS, as are weights of any size."""


class Commits:
    """`made`: repositories with what was asked of them. `stored`: large files by sha256. `taken`: files of commits."""

    def __init__(self, hub: "Hub") -> None:
        self.hub = hub
        self.made: dict[str, dict[str, Any]] = {}
        self.stored: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.taken: list[dict[str, bytes]] = []

    def of_hub(self) -> list[Route]:
        """Routes of the first host."""
        repo = "{org}/{name}"
        return [
            Route("/api/repos/create", self._create, methods=["POST"]),
            Route("/api/validate-yaml", self._validate, methods=["POST"]),
            Route(f"/api/{{kind}}/{repo}/preupload/{{revision}}", self._preupload, methods=["POST"]),
            Route(f"/api/{{kind}}/{repo}/commit/{{revision}}", self._commit, methods=["POST"]),
            Route(f"/{repo}.git/info/lfs/objects/batch", self._batch, methods=["POST"]),
            Route(f"/datasets/{repo}.git/info/lfs/objects/batch", self._batch, methods=["POST"]),
        ]

    def of_cdn(self) -> list[Route]:
        """Routes of the second one."""
        return [Route("/upload/{oid}", self._upload, methods=["PUT"])]

    async def _create(self, request: Request) -> Response:
        if (refused := self.hub.see(request, "hub", "create")) is not None:
            return refused
        asked = await request.json()
        repo = f"{asked['organization']}/{asked['name']}"
        kind = asked.get("type", "model")
        url = f"{self.hub.url}/{repo}" if kind == "model" else f"{self.hub.url}/{kind}s/{repo}"
        answer = {"url": url, "name": repo, "id": repo}
        if repo in self.made:
            return JSONResponse({"error": "You already created this repo", **answer}, 409)
        self.made[repo] = asked
        return JSONResponse(answer)

    async def _validate(self, request: Request) -> Response:
        content = (await request.json())["content"]
        if "broken: [" in content:
            return JSONResponse({"errors": [{"message": "the metadata is broken"}], "warnings": []}, 400)
        return JSONResponse({"errors": [], "warnings": []})

    async def _preupload(self, request: Request) -> Response:
        if (refused := self.hub.see(request, "hub", "preupload")) is not None:
            return refused
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs"
                if file["size"] >= LARGE or file["path"].endswith(".safetensors")
                else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in (await request.json())["files"]
        ]
        return JSONResponse({"files": files})

    async def _batch(self, request: Request) -> Response:
        if (refused := self.hub.see(request, "hub", "batch")) is not None:
            return refused
        objects = []
        for wanted in (await request.json())["objects"]:
            found: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.stored:
                found["actions"] = {"upload": {"href": f"{self.hub.cdn}/upload/{wanted['oid']}"}}
            objects.append(found)
        return JSONResponse({"transfer": "basic", "objects": objects})

    async def _upload(self, request: Request) -> Response:
        oid = request.path_params["oid"]
        if (refused := self.hub.see(request, "cdn", oid)) is not None:
            return refused
        content = await request.body()
        assert hashlib.sha256(content).hexdigest() == oid
        self.uploads.append(oid)
        self.stored[oid] = content
        return Response()

    async def _commit(self, request: Request) -> Response:
        if (refused := self.hub.see(request, "hub", "commit")) is not None:
            return refused
        files: dict[str, bytes] = {}
        for line in (await request.body()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
        self.taken.append(files)
        oid = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        path = f"{request.path_params['org']}/{request.path_params['name']}"
        return JSONResponse({"commitUrl": f"{self.hub.url}/{path}/commit/{oid}", "commitOid": oid})
