"""A model hub on loopback, with a second host for the large files, as the real one has. Its sins are attributes.

`with Hub({"org/name": {"config.json": b"…"}}) as hub:` serves until the end of the block. Every request is in
`requests`; what a test waits for, it waits for with `held`.
"""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.fakes.hub_commits import Commits
from tests.fakes.loopback import Loopback

PIECE = 32 * 1024


class Seen(NamedTuple):
    """One request: `start` of its range, and the token it brought."""

    host: str  # "hub" or "cdn"
    method: str
    path: str
    start: int
    authorization: str


class Hub:
    """`repos`: name to files. LFS files (safetensors) are redirected to the other host."""

    def __init__(self, repos: dict[str, dict[str, bytes]], token: str = "") -> None:
        self.repos = repos
        self.token = token
        self.requests: list[Seen] = []
        self.sent: dict[str, int] = {}  # bytes that left, by file
        self.drop: dict[
            str, list[int]
        ] = {}  # file to: cut the connection after so many bytes, one per request
        self.hold: dict[str, int] = {}  # file to: stop after so many bytes, until `release`
        self.spoil: dict[str, int] = {}  # file to: send it wrong so many times
        self.names: dict[str, str] = {}  # file to: the name it is listed under
        self.hashes: dict[str, str] = {}  # file to: the hash it is listed with
        self.statuses: list[tuple[int, dict[str, str]]] = []  # answered to the next requests
        self.knows_ranges = True
        self.held = threading.Event()  # somebody is being held
        self.release = threading.Event()
        self._hosts: list[Loopback] = []
        self.commits = Commits(self)
        self.url = self.cdn = ""

    def commit(self, repo: str) -> str:
        """Changes with the content, as a commit does."""
        content = repr(sorted(self.repos[repo].items())).encode()
        return hashlib.sha1(content).hexdigest()

    def __enter__(self) -> "Hub":
        cdn = Loopback([Route("/blob/{repo:path}/-/{path:path}", self._blob), *self.commits.of_cdn()])
        hub = Loopback(
            [
                *self.commits.of_hub(),
                Route("/api/models/{org}/{name}/revision/{revision:path}", self._info),
                Route("/{org}/{name}/resolve/{revision}/{path:path}", self._resolve, methods=["GET", "HEAD"]),
            ]
        )
        self._hosts = [cdn, hub]
        self.cdn, self.url = f"http://localhost:{cdn.port}", hub.url  # two hosts to whoever asks
        return self

    def __exit__(self, *error: object) -> None:
        self.release.set()
        for host in self._hosts:
            host.close()

    def starts(self, path: str) -> list[int]:
        """The range starts of every GET for the content of a file."""
        return [seen.start for seen in self.requests if seen.method == "GET" and seen.path == path]

    def see(self, request: Request, host: str, path: str) -> Response | None:
        """Write a request down; the answer where it is refused."""
        wanted = request.headers.get("range", "bytes=0-")
        start = int(wanted.removeprefix("bytes=").split("-")[0])
        told = request.headers.get("authorization", "")
        self.requests.append(Seen(host, request.method, path, start, told))
        if self.statuses:
            status, headers = self.statuses.pop(0)
            return JSONResponse({"error": "no"}, status, headers)
        if host == "hub" and self.token and told != f"Bearer {self.token}":
            return JSONResponse({"error": "no"}, 401, {"x-error-code": "RepoNotFound"})
        return None

    async def _info(self, request: Request) -> Response:
        repo = f"{request.path_params['org']}/{request.path_params['name']}"
        revision = request.path_params["revision"]
        if (refused := self.see(request, "hub", repo)) is not None:
            return refused
        if repo not in self.repos:
            return JSONResponse({"error": "Repository not found"}, 404, {"x-error-code": "RepoNotFound"})
        if revision not in ("main", "v1", self.commit(repo)):
            return JSONResponse({"error": "Invalid rev"}, 404, {"x-error-code": "RevisionNotFound"})
        files = [self._listed(path, content) for path, content in self.repos[repo].items()]
        return JSONResponse({"id": repo, "modelId": repo, "sha": self.commit(repo), "siblings": files})

    def _listed(self, path: str, content: bytes) -> dict[str, Any]:
        listed: dict[str, Any] = {
            "rfilename": self.names.get(path, path),
            "size": len(content),
            "blobId": self.hashes.get(path, git_hash(content)),
        }
        if is_large(path):
            sha = self.hashes.get(path, hashlib.sha256(content).hexdigest())
            listed["lfs"] = {"sha256": sha, "size": len(content), "pointerSize": 130}
        return listed

    async def _resolve(self, request: Request) -> Response:
        repo = f"{request.path_params['org']}/{request.path_params['name']}"
        path = request.path_params["path"]
        if (refused := self.see(request, "hub", path if not is_large(path) else f"-> {path}")) is not None:
            return refused
        content = self.repos.get(repo, {}).get(path)
        if content is None:
            return JSONResponse({"error": "Entry not found"}, 404, {"x-error-code": "EntryNotFound"})
        headers = {
            "x-repo-commit": self.commit(repo),
            "etag": f'"{git_hash(content)}"',
            "accept-ranges": "bytes",
        }
        if is_large(path):
            sha = hashlib.sha256(content).hexdigest()
            headers |= {"x-linked-etag": f'"{sha}"', "x-linked-size": str(len(content))}
            return RedirectResponse(f"{self.cdn}/blob/{repo}/-/{path}?signature=s3cret", 302, headers)
        return self._send(request, path, content, headers)

    async def _blob(self, request: Request) -> Response:
        path = request.path_params["path"]
        if (refused := self.see(request, "cdn", path)) is not None:
            return refused
        return self._send(request, path, self.repos[request.path_params["repo"]][path], {})

    def _send(self, request: Request, path: str, content: bytes, headers: dict[str, str]) -> Response:
        start = self.requests[-1].start if self.knows_ranges else 0
        if start and start >= len(content):
            return Response(status_code=416)
        body = content[start:]
        if self.spoil.get(path, 0) > 0:
            self.spoil[path] -= 1
            body = bytes(reversed(body)) if body != bytes(reversed(body)) else b"!" * len(body)
        headers = headers | {"content-length": str(len(body))}
        if start:
            headers["content-range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if request.method == "HEAD":
            return Response(headers=headers)
        drops = self.drop.get(path, [])
        pieces = self._pieces(path, body, drops.pop(0) if drops else None)
        return StreamingResponse(pieces, 206 if start else 200, headers, "application/octet-stream")

    async def _pieces(self, path: str, body: bytes, drop: int | None) -> AsyncIterator[bytes]:
        hold = self.hold.get(path)
        sent = 0
        if drop == 0:
            raise ConnectionResetError("the hub drops the line at once")
        while sent < len(body):
            stops = [stop for stop in (drop, hold) if stop is not None and stop > sent]
            piece = body[sent : min([sent + PIECE, *stops])]
            self.sent[path] = self.sent.get(path, 0) + len(piece)
            yield piece
            sent += len(piece)
            if drop is not None and sent >= drop:
                await asyncio.sleep(0.05)  # the transport writes; then the line is cut
                raise ConnectionResetError("the hub drops the line")
            if hold is not None and sent >= hold:
                self.held.set()
                await asyncio.to_thread(self.release.wait)


def is_large(path: str) -> bool:
    """Stored with LFS."""
    return PurePosixPath(path).suffix == ".safetensors"


def git_hash(content: bytes) -> str:
    """As git names a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
