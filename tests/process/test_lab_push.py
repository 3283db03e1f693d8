"""Uploads to a hub of our own, each in a worker of its own: what arrives, what is not sent twice, what is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from parent.jobs.run import run_job
from shared.errors import ErrorCode, Refused
from shared.jobs import JobDone, JobEvent, JobStage
from shared.lab import Push
from tests.fakes.hub import Hub
from tests.process.pulling import environment

TOKEN = "hf_secretsecret"
REPO = "org/mine"
WEIGHTS = b"w" * 5000


def adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapters.safetensors").write_bytes(WEIGHTS)
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "fine_tune_type": "lora",
                "lora_parameters": {"rank": 8, "scale": 2.0},
                "base_model": "org/base",
            }
        )
    )
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    (folder / "checkpoints" / "step-1" / "adapters.safetensors").write_bytes(b"small")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "secret").write_text("mine")
    (folder / ".hidden").write_text("mine")
    return folder


def push(
    hub: Hub, folder: Path, home: Path, *, token: str = TOKEN, told: list[JobEvent] | None = None, **more: Any
) -> JobDone:
    events = [] if told is None else told
    env = environment(hub.url, home, token)
    return asyncio.run(
        run_job(Push(folder=str(folder), repo=REPO, **more), "", on_event=events.append, worker_env=env)
    )


def test_a_lab_push_brings_a_folder_s_own_files_in_one_commit(tmp_path: Path) -> None:
    folder, told = adapter(tmp_path / "mine"), list[JobEvent]()
    with Hub({}, TOKEN) as hub:
        done = push(hub, folder, tmp_path, told=told)
        made = hub.commits.made[REPO]
        assert (made["organization"], made["name"], made["visibility"]) == ("org", "mine", "private")
        [files] = hub.commits.taken
        tokens = {seen.authorization for seen in hub.requests if seen.host == "hub"}
        assert done.result["url"] == f"{hub.url}/{REPO}"
    assert sorted(files) == [
        "README.md",
        "adapter_config.json",
        "adapters.safetensors",
        "checkpoints/step-1/adapters.safetensors",
    ]
    assert files["adapters.safetensors"] == WEIGHTS
    card = files["README.md"].decode()
    assert 'base_model: "org/base"' in card
    assert "rank 8, scale 2.0" in card
    assert tokens == {f"Bearer {TOKEN}"}
    uploads = [event for event in told if isinstance(event, JobStage) and event.stage == "upload"]
    assert uploads[-1].done == uploads[-1].total
    assert isinstance(told[1], JobStage)
    assert told[1].stage == "create"
    assert done.summary.startswith("3 files, ")


def test_a_lab_push_does_not_send_what_is_there(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "mine")
    with Hub({}, TOKEN) as hub:
        push(hub, folder, tmp_path)
        assert len(hub.commits.uploads) == 2
        push(hub, folder, tmp_path)
        assert len(hub.commits.uploads) == 2
        (folder / "adapters.safetensors").write_bytes(b"other")
        push(hub, folder, tmp_path, private=False)
        assert len(hub.commits.uploads) == 3
        assert hub.commits.taken[-1]["adapters.safetensors"] == b"other"


def test_a_dataset_push_tells_nothing_of_its_making(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    (folder / "report.json").write_text(
        json.dumps(
            {"rows": 1, "format": "text", "template": "code_completion", "inputs": {"src_dir": "/home/me"}}
        )
    )
    with Hub({}, TOKEN) as hub:
        push(hub, folder, tmp_path, kind="dataset")
        assert hub.commits.made[REPO]["type"] == "dataset"
        [files] = hub.commits.taken
    assert sorted(files) == ["README.md", "train.jsonl"]
    assert b"code_completion" in files["README.md"]
    assert b"/home/me" not in files["README.md"]


def test_a_lab_card_that_is_there_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "mine")
    (folder / "README.md").write_text("---\nmine: true\n---\n")
    with Hub({}, TOKEN) as hub:
        push(hub, folder, tmp_path)
        assert hub.commits.taken[0]["README.md"] == b"---\nmine: true\n---\n"
        (folder / "README.md").write_text("---\nbroken: [\n---\n")
        with pytest.raises(Refused, match="the metadata is broken") as refused:
            push(hub, folder, tmp_path)
        assert refused.value.failure.code is ErrorCode.INVALID_REQUEST
        assert len(hub.commits.taken) == 1


def test_a_lab_push_follows_no_link_out_of_its_folder(tmp_path: Path) -> None:
    folder, secret = adapter(tmp_path / "mine"), tmp_path / "secret"
    secret.write_text("mine")
    (folder / "config.json").symlink_to(secret)
    with Hub({}, TOKEN) as hub:
        with pytest.raises(Refused, match="leads out of the folder") as refused:
            push(hub, folder, tmp_path)
        assert hub.requests == []
    assert refused.value.failure.code is ErrorCode.INVALID_REQUEST


def test_a_lab_push_without_a_token_or_files_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "mine")
    with Hub({}, TOKEN) as hub:
        with pytest.raises(Refused, match="there is no token for") as refused:
            push(hub, folder, tmp_path, token="")
        assert refused.value.failure.code is ErrorCode.HUB
        (tmp_path / "empty").mkdir()
        with pytest.raises(Refused, match="there is nothing to push"):
            push(hub, tmp_path / "empty", tmp_path)
        assert hub.requests == []


@pytest.mark.parametrize(
    ("status", "said"),
    [(403, "does not let this token write to org/mine"), (401, "org/mine"), (429, "is busy or broken")],
)
def test_a_lab_push_that_the_hub_refuses_says_why_without_the_token(
    tmp_path: Path, status: int, said: str
) -> None:
    folder = adapter(tmp_path / "mine")
    with Hub({}, TOKEN) as hub:
        hub.commits.made[REPO] = {}
        hub.statuses = [(status, {})] * 20
        with pytest.raises(Refused, match=said) as refused:
            push(hub, folder, tmp_path)
        assert hub.commits.taken == []
    assert refused.value.failure.code is ErrorCode.HUB
    assert (refused.value.failure.retry_after_s is not None) == (status == 429)
    assert TOKEN not in str(refused.value)


def test_a_lab_token_of_the_settings_is_read_from_its_file(tmp_path: Path) -> None:
    folder, file = adapter(tmp_path / "mine"), tmp_path / "hf-token"
    file.write_text(TOKEN)
    with Hub({}, TOKEN) as hub:
        env = environment(hub.url, tmp_path, "") | {"HF_TOKEN_PATH": str(file)}
        asyncio.run(run_job(Push(folder=str(folder), repo=REPO), "", worker_env=env))
        assert len(hub.commits.taken) == 1
