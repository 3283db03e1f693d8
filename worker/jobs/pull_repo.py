"""Download a model repository into the Hugging Face cache: resumable to the byte, every file checked by its hash.

`huggingface_hub` throws a half-downloaded file away with its process, so the transfer itself is ours: one GET with
`Range` through the library's session, which keeps the token from other hosts when the hub redirects there. A network
that is lost is a `hub` failure with `retry_after_s` set: the same job, begun again, goes on where this one was.
"""

import hashlib
import os
import time
from contextlib import AbstractContextManager
from typing import Protocol

import httpx2

from shared.errors import ErrorCode, refuse
from shared.jobs import JobDone, JobStage, PullRepo
from shared.units import format_bytes
from worker.jobs.context import JobContext
from worker.jobs.hub import RemoteFile, explain, resolve  # before the library: it sets its variables
from worker.jobs.hub_cache import RepoCache, disk_refusal

from huggingface_hub import constants, get_session, hf_hub_url  # isort: skip
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled  # isort: skip
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # isort: skip  # exported lazily
    build_hf_headers,
    hf_raise_for_status,
)

CHUNK = 1 << 20
TOLD_S = 0.1
SPACE_EVERY = 64 << 20  # bytes between two looks at the free disk


def run(spec: PullRepo, ctx: JobContext) -> JobDone:
    """Raises `Refused`: hub, disk_full, conflict (another process is at it), shutting_down (it was stopped)."""
    ctx.emit(JobStage("look up", message=spec.repo))
    repository = resolve(spec.repo, spec.revision)
    cache = RepoCache(spec.cache_dir, spec.repo)
    try:
        with cache.pulling(repository.commit):
            pull = _Pull(spec, ctx, cache, repository.commit, repository.files)
            pull.check_present()
            pull.download()
            snapshot = cache.publish(repository, spec.revision)
            cache.clear_parts()
    except OSError as error:
        raise disk_refusal(error, cache) from None
    size = format_bytes(sum(file.size for file in repository.files))
    summary = f"{spec.repo} at {repository.commit[:7]}: {len(repository.files)} files, {size}"
    return JobDone(output=str(snapshot), summary=summary)


class _Digest(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


def _digest(file: RemoteFile) -> _Digest:
    """The hash that names the file's content: LFS files by sha256, the rest as git names them."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


class _Pull:
    """One run: what is verified, and what there is to tell."""

    def __init__(
        self, spec: PullRepo, ctx: JobContext, cache: RepoCache, commit: str, files: list[RemoteFile]
    ) -> None:
        self.spec, self.ctx, self.cache, self.commit, self.files = spec, ctx, cache, commit, files
        self.verified: set[str] = set()
        self._told_at = 0.0
        self._here: dict[str, int] = {}  # bytes of each content that are here
        self._total = sum(file.size for file in files)
        self._looked_at = 0

    def check_present(self) -> None:
        """Hash what the cache holds already; what is not what its name says is removed."""
        present = [file for file in self.files if self.cache.blob(file).is_file()]
        total, before = sum(file.size for file in present), 0
        for file in present:
            blob = self.cache.blob(file)
            digest, size = _digest(file), 0
            with blob.open("rb") as opened:
                while chunk := opened.read(CHUNK):
                    self._check()
                    digest.update(chunk)
                    size += len(chunk)
                    self._tell("check", before + size, total, file)
            if size == file.size and digest.hexdigest() == file.etag:
                self.verified.add(file.etag)
            else:
                blob.unlink()
            before += file.size
            self._tell("check", before, total, file, now=True)

    def download(self) -> None:
        """Fetch what is missing. Progress is bytes of the whole repository, those that were here included."""
        missing = {file.etag: self.cache.missing(file) for file in self.files}
        self.cache.require_space(sum(missing.values()), self.spec.floor_bytes)
        self._here = {file.etag: file.size - missing[file.etag] for file in self.files}
        self._looked_at = self._done()
        self._tell("download", self._done(), self._total, None, now=True)
        for file in self.files:
            if file.etag not in self.verified:  # or two names of one content
                with self.cache.locked(file):
                    self._fetch(file)
                self.verified.add(file.etag)

    def _fetch(self, file: RemoteFile) -> None:
        """Until it is here and is what its hash says. Raises `Refused`; a wrong file is not left behind."""
        part = self.cache.part(file)
        for _ in range(2):
            if self._receive(file) == file.etag:
                part.replace(self.cache.blob(file))
                return
            part.unlink()
        raise refuse(
            ErrorCode.HUB,
            f"{file.path} of {self.spec.repo} came twice with another hash than the hub says; nothing of it was "
            "kept: try later, or another HF_ENDPOINT",
        )

    def _receive(self, file: RemoteFile) -> str:
        """The rest of the file, over as many connections as bring something. Returns the hash of it all."""
        self.cache.began(file)
        with self.cache.part(file).open("a+b") as out:
            digest = _digest(file)
            out.seek(0)
            while chunk := out.read(CHUNK):
                self._check()
                digest.update(chunk)
            while out.tell() < file.size:
                before = out.tell()
                try:
                    with self._open(file, before) as response:
                        hf_raise_for_status(response)
                        if (
                            before and response.status_code != 206
                        ):  # the server knows no ranges: all of it again
                            out.seek(0)
                            out.truncate()
                            before, digest = 0, _digest(file)
                        for chunk in response.iter_bytes():
                            self._check()
                            out.write(chunk)
                            digest.update(chunk)
                            self._progress(file, out.tell())
                            if out.tell() >= file.size:
                                break
                except (HfHubHTTPError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
                    status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
                    if status == 416:  # what is here is no beginning of what is there
                        return ""
                    if status or out.tell() <= before:
                        raise explain(error, f"{file.path} of {self.spec.repo}") from None
                else:
                    if out.tell() <= before:  # it ended early, with a clean end and nothing in it
                        raise explain(
                            httpx2.RemoteProtocolError("the answer was empty"),
                            f"{file.path} of {self.spec.repo}",
                        )
                finally:
                    out.flush()
                    self._progress(file, out.tell(), now=True)
            os.fsync(out.fileno())
            return digest.hexdigest() if out.tell() == file.size else ""

    def _open(self, file: RemoteFile, start: int) -> AbstractContextManager[httpx2.Response]:
        headers = build_hf_headers(library_name="mlxd") | {"accept-encoding": "identity"}
        if start:
            headers["range"] = f"bytes={start}-"
        return get_session().stream(
            "GET",
            hf_hub_url(self.spec.repo, file.path, revision=self.commit),
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=True,
        )

    def _check(self) -> None:
        if self.ctx.should_stop():
            raise refuse(
                ErrorCode.SHUTTING_DOWN, "the download was stopped; what is here stays for the next time"
            )

    def _done(self) -> int:
        return sum(self._here[file.etag] for file in self.files)

    def _progress(self, file: RemoteFile, here: int, *, now: bool = False) -> None:
        self._here[file.etag] = here
        done = self._done()
        if abs(done - self._looked_at) >= SPACE_EVERY:
            self._looked_at = done
            self.cache.require_space(0, self.spec.floor_bytes)
        self._tell("download", done, self._total, file, now=now)

    def _tell(self, stage: str, done: int, total: int, file: RemoteFile | None, *, now: bool = False) -> None:
        clock = time.monotonic()
        if now or clock - self._told_at >= TOLD_S:
            self._told_at = clock
            self.ctx.emit(JobStage(stage, done, total, file.path if file else ""))
