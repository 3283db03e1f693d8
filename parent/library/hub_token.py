"""The token for the hub that a person gave us: a file of 0600 in the data folder, for workers to read, told to nobody.

`huggingface_hub` takes `HF_TOKEN` first, then the file that `HF_TOKEN_PATH` names; so workers get these variables.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from shared.errors import ErrorCode, refuse

NAME = "hf-token"
MOST_CHARS = 512


class HubToken:
    """The token of a data folder."""

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / NAME

    def is_kept(self) -> bool:
        return self.path.is_file()

    def env(self) -> dict[str, str]:
        """Variables for workers: what was given to us counts before what the user's environment says."""
        if not self.is_kept():
            return {}
        return {"HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": "", "HF_TOKEN_PATH": str(self.path)}

    def has_any(self, environ: Mapping[str, str] = os.environ, home: Path | None = None) -> bool:
        """Whether a worker finds one, ours or the user's."""
        if self.is_kept() or environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN"):
            return True
        caches = Path(environ.get("XDG_CACHE_HOME") or (home or Path.home()) / ".cache")
        place = Path(environ.get("HF_HOME") or caches / "huggingface") / "token"
        return Path(environ.get("HF_TOKEN_PATH") or place).is_file()

    def keep(self, token: str) -> None:
        """Raises `Refused` (invalid_request, forbidden)."""
        token = token.strip()
        if (
            not token
            or len(token) > MOST_CHARS
            or not token.isascii()
            or not token.isprintable()
            or " " in token
        ):
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                "token: give one of huggingface.co/settings/tokens, a single word",
                param="token",
            )
        scratch = self.path.with_name(f".{NAME}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(token)
            scratch.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise refuse(ErrorCode.FORBIDDEN, f"{self.path}: cannot be written ({error.strerror})") from None

    def forget(self) -> None:
        """Remove ours."""
        self.path.unlink(missing_ok=True)
