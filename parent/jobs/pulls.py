"""Pulls as people ask for them: `org/name[@revision]`, and the settings that say where to."""

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from parent.config import Settings
from parent.jobs import kinds
from parent.jobs.store import Job
from parent.library.hf_cache import cache_dir
from shared.errors import ErrorCode, refuse
from shared.jobs import PullRepo

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_MODEL = re.compile(rf"({_PART}/{_PART})(?:@([^\s@]{{1,200}}))?")


def spec_of(model: str, settings: Settings, environ: Mapping[str, str], home: Path) -> PullRepo:
    """The job of `org/name[@revision]`. Raises `Refused`: no such name, or no cache to pull to."""
    found = _MODEL.fullmatch(model)
    if found is None:
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"cannot pull {model!r}: write ORG/NAME or ORG/NAME@REVISION of the hub, such as "
            "mlx-community/SmolLM2-135M-Instruct",
            param="model",
        )
    cache = cache_dir(settings.hf_cache, environ, home)
    if cache is None:
        raise refuse(ErrorCode.CONFLICT, "there is nowhere to pull to: the setting hf_cache is none")
    return PullRepo(
        repo=found[1], revision=found[2] or "", cache_dir=str(cache), floor_bytes=settings.disk_floor_bytes
    )


def model_of(job: Job) -> str:
    """What was asked for, as it was written; "" where the row is of another version of mlxd, or no pull."""
    spec = pulled(job)
    return written(spec) if spec is not None else ""


def pulled(job: Job) -> PullRepo | None:
    """What a pull was asked for; None where the row is of another version of mlxd, or no pull."""
    try:
        spec = kinds.decode_spec(job.spec)
    except msgspec.MsgspecError:
        return None
    return spec if isinstance(spec, PullRepo) else None


def written(spec: PullRepo) -> str:
    """`org/name[@revision]`."""
    return f"{spec.repo}@{spec.revision}" if spec.revision else spec.repo
