"""The hub as a pull sees it: what a repository holds, which of its files a model needs, and why it refuses.

`huggingface_hub` reads `HF_ENDPOINT`, `HF_TOKEN` and its token file. What it calls home with besides the hub's own
routes is switched off: a mirror that somebody set is then all that is spoken to.
"""

import os
import re
from pathlib import PurePosixPath
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

for _name in ("HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_PROGRESS_BARS"):
    os.environ.setdefault(_name, "1")  # read when the library is imported

import httpx2  # noqa: E402
from huggingface_hub import HfApi, constants, get_token  # noqa: E402
from huggingface_hub.errors import (  # noqa: E402
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from shared.errors import ErrorCode, Refused, refuse  # noqa: E402

_SUFFIXES = (".json", ".jinja", ".txt", ".safetensors", ".model", ".tiktoken")
_NEVER = (".bin", ".gguf", ".onnx", ".pt", ".pth", ".h5", ".msgpack", ".ckpt", ".py")
_OTHER_FORMATS = {"original", "onnx", "openvino", "pytorch", "coreml", "metal", "gguf", "flax", "tf"}
_HEX = {40: re.compile(r"[0-9a-f]{40}"), 64: re.compile(r"[0-9a-f]{64}")}
_BUSY = {408, 425, 429, 500, 502, 503, 504}


class RemoteFile(NamedTuple):
    """One file: `sha256` of its content where it is stored with LFS, else "" and `blob_id`, git's sha1."""

    path: str
    size: int
    sha256: str
    blob_id: str

    @property
    def etag(self) -> str:
        """The name of its blob in the cache."""
        return self.sha256 or self.blob_id


class Repository(NamedTuple):
    """What one commit holds of what a model needs."""

    repo: str
    commit: str
    files: list[RemoteFile]


def resolve(repo: str, revision: str) -> Repository:
    """Ask the hub. Raises `Refused` (hub; invalid_request for a name that cannot be one)."""
    wanted = revision or "main"
    if not is_safe(wanted):
        raise refuse(ErrorCode.INVALID_REQUEST, f"{wanted!r} cannot be a revision")
    try:
        info = HfApi().model_info(
            repo, revision=wanted, files_metadata=True, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT
        )
        commit, siblings = info.sha or "", info.siblings or []
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, httpx2.HTTPError) as error:
        raise explain(error, f"{repo}@{revision}" if revision else repo) from None
    except (ValueError, KeyError, TypeError, AttributeError):  # an answer, but not a hub's
        raise _not_a_hub() from None
    if not _HEX[40].fullmatch(commit):
        raise _not_a_hub()
    files = []
    for sibling in siblings:
        name, lfs = sibling.rfilename, sibling.lfs
        if not is_safe(name):
            raise refuse(ErrorCode.HUB, f"{repo} lists a file {name!r}: no such name is written to the disk")
        if is_wanted(name):
            files.append(
                RemoteFile(name, sibling.size or 0, lfs.sha256 if lfs else "", sibling.blob_id or "")
            )
    files = without_doubles(files)
    for file in files:
        if not _HEX[64 if file.sha256 else 40].fullmatch(file.etag) or file.size < 0:
            raise refuse(ErrorCode.HUB, f"{repo}: the hub gives no usable hash for {file.path}")
    if not any(file.path.endswith(".safetensors") for file in files):
        kinds = ", ".join(sorted({PurePosixPath(each.rfilename).suffix or "none" for each in siblings}))
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"{repo} has no safetensors weights (its files: {kinds}); pull a repository that has, or take a "
            "GGUF file in with `mlxd import`",
        )
    return Repository(repo, commit, files)


def is_safe(name: str) -> bool:
    """A relative path that stays below where it is written, on every system."""
    parts = name.split("/")
    return (
        0 < len(name) <= 1000
        and name.isprintable()
        and not any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
        and not any(mark in name for mark in ("\\", ":"))
    )


def is_wanted(name: str) -> bool:
    path = PurePosixPath(name)
    if path.suffix in _NEVER or any(part in _OTHER_FORMATS or part.startswith(".") for part in path.parts):
        return False
    return path.suffix in _SUFFIXES or path.name.startswith("tokenizer")


def without_doubles(files: list[RemoteFile]) -> list[RemoteFile]:
    """Some repositories hold their weights twice, once in the layout of their author's own tools."""
    names = {file.path for file in files}
    if not names & {"model.safetensors", "model.safetensors.index.json"}:
        return files
    return [
        file for file in files if not re.fullmatch(r"consolidated.*\.safetensors(\.index\.json)?", file.path)
    ]


def endpoint() -> str:
    """The hub's address without what may be secret in it."""
    parts = urlsplit(constants.ENDPOINT)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", "")).rstrip("/")


def explain(error: Exception, what: str) -> Refused:
    """Why the hub did not give `what`, and what to do. `retry_after_s` is set where trying again may help."""
    hub = endpoint()
    if isinstance(error, HFValidationError):
        said = f"{what!r} is no model of the hub; write org/name or org/name@revision"
        return refuse(ErrorCode.INVALID_REQUEST, said)
    if isinstance(error, OfflineModeIsEnabled):
        return _hub(f"cannot fetch {what}: HF_HUB_OFFLINE is set; unset it, and try again")
    if isinstance(error, GatedRepoError):
        page = what.partition("@")[0]
        return _hub(f"{what} is gated: accept its terms at {hub}/{page}, then set HF_TOKEN to your token")
    if isinstance(error, RevisionNotFoundError):
        return _hub(f"{what}: {hub} has the model, but no such revision")
    if isinstance(error, RepositoryNotFoundError):
        return _hub(f"{hub} has no model {what}, or it is private: check its name, or set HF_TOKEN to see it")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return _refused_by_status(error.response, what)
    if isinstance(error, httpx2.TransportError):
        reason = " ".join(str(error).split()) or type(error).__name__
        said = f"cannot reach {hub} for {what}: {reason}; check the network and HF_ENDPOINT"
        return _hub(said, retry_after_s=0.0)
    if isinstance(error, httpx2.HTTPError | ValueError):
        return _hub(f"{hub} cannot be asked for {what}: {type(error).__name__}; check HF_ENDPOINT")
    raise error


def _refused_by_status(response: httpx2.Response, what: str) -> Refused:
    status, said = response.status_code, response.headers.get("x-error-message", "")
    reason = f" ({said[:200]})" if said else ""
    if status in _BUSY:
        asked = response.headers.get("retry-after", "")
        patience = float(asked) if re.fullmatch(r"\d{1,6}", asked) else 0.0
        return _hub(
            f"{endpoint()} is busy or broken: status {status} for {what}{reason}", retry_after_s=patience
        )
    advice = {
        401: "the token is not accepted; set HF_TOKEN to a valid one",
        403: "your account may not read it; set HF_TOKEN to a token that may",
        404: "there is nothing of that name; check it, and HF_ENDPOINT",
    }.get(status, "check HF_ENDPOINT")
    return _hub(f"{endpoint()} refuses {what} with status {status}{reason}: {advice}")


def _not_a_hub() -> Refused:
    return _hub(f"{endpoint()} does not answer as a model hub does; check HF_ENDPOINT")


def _hub(message: str, retry_after_s: float | None = None) -> Refused:
    """A hub may repeat in its answer what it was sent: the token must not get into logs and rows."""
    token = get_token()
    if token:
        message = message.replace(token, "…")
    return refuse(ErrorCode.HUB, message, retry_after_s=retry_after_s)
