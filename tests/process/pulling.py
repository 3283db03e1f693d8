"""What the tests of pulls share: a model to pull, the variables of its worker, and one run of it."""

import asyncio
import random
from pathlib import Path

from parent.jobs.run import run_job
from shared.jobs import JobDone, JobEvent, JobStage, PullRepo

REPO = "org/tiny"
WEIGHTS = "model.safetensors"


def files(size: int = 600_000) -> dict[str, bytes]:
    """A repository with what a model needs, and with what it does not."""
    made = random.Random(size)
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": made.randbytes(5000),
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"# read me",
        "1_Pooling/config.json": b"{}",
        WEIGHTS: made.randbytes(size),
        "pytorch_model.bin": b"no",
        "model.Q4_0.gguf": b"no",
        "onnx/model.onnx": b"no",
        "original/consolidated.safetensors": b"no",
        ".gitattributes": b"",
    }


NEEDED = {"config.json", "tokenizer.json", "chat_template.jinja", "1_Pooling/config.json", WEIGHTS}


def environment(url: str, folder: Path, token: str = "") -> dict[str, str]:
    """Nothing of the user's own hub: neither cache nor token nor proxy."""
    return {
        "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_CACHE": str(folder / "cache"),
        "HF_TOKEN": token,
        "HF_HUB_DOWNLOAD_TIMEOUT": "30",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }


def pull(
    url: str, folder: Path, *, token: str = "", revision: str = "", floor: int = 0, repo: str = REPO
) -> JobDone:
    """One run in a worker of its own. Raises `Refused`."""
    return asyncio.run(
        run_job(
            PullRepo(repo=repo, revision=revision, floor_bytes=floor),
            "",
            worker_env=environment(url, folder, token),
        )
    )


def events(url: str, folder: Path) -> list[JobStage]:
    """What one run tells."""
    told: list[JobEvent] = []
    asyncio.run(
        run_job(
            PullRepo(repo=REPO, floor_bytes=0), "", on_event=told.append, worker_env=environment(url, folder)
        )
    )
    return [event for event in told if isinstance(event, JobStage)]


def cache_of(folder: Path, repo: str = REPO) -> Path:
    """The repository's folder in the cache."""
    return folder / "cache" / "--".join(["models", *repo.split("/")])


def content_of(snapshot: Path) -> dict[str, bytes]:
    """Every file of a snapshot, links followed."""
    return {
        path.relative_to(snapshot).as_posix(): path.read_bytes()
        for path in snapshot.rglob("*")
        if path.is_file()
    }


def part_of(folder: Path) -> Path | None:
    """The one file that is half there."""
    found = list(cache_of(folder).glob("blobs/*.incomplete"))
    return found[0] if found else None
