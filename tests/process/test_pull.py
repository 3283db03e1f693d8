"""Pulls from a hub of our own: what arrives, what is resumed, what is refused, and what no one gets to see."""

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from parent.jobs.run import run_job
from parent.workers import launcher
from parent.workers.channel import Channel
from shared import control
from shared.errors import ErrorCode, Refused
from shared.jobs import JobStage, PullRepo
from tests.fakes.hub import Hub, git_hash
from tests.process.harness import ROOT, until
from tests.process.pulling import (
    NEEDED,
    REPO,
    WEIGHTS,
    cache_of,
    content_of,
    environment,
    events,
    files,
    part_of,
    pull,
)

TOKEN = "hf_secretsecretsecret"


def test_a_pull_brings_what_a_model_needs_into_the_shared_cache(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        done = pull(hub.url, tmp_path)
        snapshot = Path(done.output)
        assert snapshot == cache_of(tmp_path) / "snapshots" / hub.commit(REPO)
        assert content_of(snapshot) == {path: files()[path] for path in NEEDED}
        assert (cache_of(tmp_path) / "refs" / "main").read_text() == hub.commit(REPO)
        assert [path.name for path in cache_of(tmp_path).glob(".*")] == []
        assert not list(cache_of(tmp_path).rglob("*.incomplete"))
        assert done.summary == f"{REPO} at {hub.commit(REPO)[:7]}: 5 files, 605 kB"


def test_other_tools_find_it_without_the_network(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        done = pull(hub.url, tmp_path)
    script = (
        "from huggingface_hub import hf_hub_download, scan_cache_dir\n"
        f"print(hf_hub_download({REPO!r}, {WEIGHTS!r}, local_files_only=True))\n"
        "(repo,) = scan_cache_dir().repos; print(repo.repo_id, repo.nb_files, *repo.refs)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **environment("http://127.0.0.1:9", tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said == [f"{done.output}/{WEIGHTS}", f"{REPO} 5 main"]


def test_what_is_there_is_checked_and_not_fetched_again(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        pull(hub.url, tmp_path)
        sent = dict(hub.sent)
        told = events(hub.url, tmp_path)
        assert hub.sent == sent
        assert [(event.stage, event.done == event.total) for event in told[-2:]] == [
            ("check", True),
            ("download", True),
        ]
        damaged = cache_of(tmp_path) / "blobs" / git_hash(files()["tokenizer.json"])
        damaged.write_bytes(b"x" * damaged.stat().st_size)
        done = pull(hub.url, tmp_path)
        assert content_of(Path(done.output))["tokenizer.json"] == files()["tokenizer.json"]
        assert hub.sent[WEIGHTS] == sent[WEIGHTS]


def test_a_newer_commit_shares_what_has_not_changed(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        first = pull(hub.url, tmp_path)
        hub.repos[REPO]["config.json"] = b'{"model_type": "qwen2"}'
        second = pull(hub.url, tmp_path)
        assert first.output != second.output
        assert hub.sent[WEIGHTS] == len(files()[WEIGHTS])
        assert content_of(Path(first.output))["config.json"] == files()["config.json"]
        assert (cache_of(tmp_path) / "refs" / "main").read_text() == hub.commit(REPO)


@pytest.mark.parametrize("revision", ["v1", "commit"])
def test_a_revision_is_a_branch_a_tag_or_a_commit(tmp_path: Path, revision: str) -> None:
    with Hub({REPO: files(1000)}) as hub:
        given = hub.commit(REPO) if revision == "commit" else revision
        assert Path(pull(hub.url, tmp_path, revision=given).output).name == hub.commit(REPO)
        refs = [path.name for path in (cache_of(tmp_path) / "refs").glob("*")]
        assert refs == ([] if revision == "commit" else ["v1"])


def test_a_snapshot_another_tool_began_is_completed(tmp_path: Path) -> None:
    with Hub({REPO: files(1000)}) as hub:
        begun = cache_of(tmp_path) / "snapshots" / hub.commit(REPO)
        begun.mkdir(parents=True)
        (begun / "README.md").write_bytes(b"# read me")
        assert set(content_of(Path(pull(hub.url, tmp_path).output))) == NEEDED | {"README.md"}


def test_dropped_connections_are_taken_up_where_they_broke(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        hub.drop[WEIGHTS] = [200_000, 200_000]
        done = pull(hub.url, tmp_path)
        assert content_of(Path(done.output))[WEIGHTS] == files()[WEIGHTS]
        first, second, third = hub.starts(WEIGHTS)
        assert first == 0
        assert 0 < second <= 200_000
        assert second < third <= 400_000


def test_a_hub_without_ranges_is_asked_for_the_whole_again(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        hub.knows_ranges = False
        hub.drop[WEIGHTS] = [200_000]
        done = pull(hub.url, tmp_path)
        assert content_of(Path(done.output))[WEIGHTS] == files()[WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_wrong_file_is_fetched_once_more(tmp_path: Path, name: str) -> None:
    with Hub({REPO: files()}) as hub:
        hub.spoil[name] = 1
        done = pull(hub.url, tmp_path)
        assert content_of(Path(done.output)) == {path: files()[path] for path in NEEDED}
        assert hub.starts(name) == [0, 0]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
def test_a_file_that_stays_wrong_is_named_and_nothing_appears(tmp_path: Path, name: str) -> None:
    with Hub({REPO: files()}) as hub:
        hub.spoil[name] = 99
        with pytest.raises(Refused, match=f"{name} of {REPO} came twice with another hash") as refused:
            pull(hub.url, tmp_path)
        assert refused.value.failure.code is ErrorCode.HUB
        assert refused.value.failure.retry_after_s is None
        assert not (cache_of(tmp_path) / "snapshots").exists()
        assert not (cache_of(tmp_path) / "refs").exists()
        assert not list(cache_of(tmp_path).rglob("*.incomplete"))
        hub.spoil.clear()
        pull(hub.url, tmp_path)


def test_garbage_left_by_somebody_else_does_not_spoil_a_file(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        pull(hub.url, tmp_path)
        (blob,) = [path for path in cache_of(tmp_path).glob("blobs/*") if path.stat().st_size > 100_000]
        for garbage in (b"z" * 1000, b"z" * 2_000_000):
            blob.unlink()
            blob.with_name(f"{blob.name}.incomplete").write_bytes(garbage)
            done = pull(hub.url, tmp_path)
            assert content_of(Path(done.output))[WEIGHTS] == files()[WEIGHTS]


def test_a_network_that_is_lost_is_worth_another_try(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        hub.drop[WEIGHTS] = [100_000] + [0] * 9
        with pytest.raises(Refused, match=f"cannot reach {hub.url}") as refused:
            pull(hub.url, tmp_path)
        assert refused.value.failure.retry_after_s is not None
        assert not (cache_of(tmp_path) / "snapshots").exists()
        hub.drop.clear()
        pull(hub.url, tmp_path)
        assert 0 < hub.starts(WEIGHTS)[-1] <= 100_000


def test_a_hub_that_is_down_is_worth_another_try(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://user:pa55@127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(
            Refused, match=r"cannot reach http://127.0.0.1:\d+ for org/tiny: .*HF_ENDPOINT"
        ) as refused:
            pull(url, tmp_path)
    assert refused.value.failure.retry_after_s is not None
    assert "pa55" not in str(refused.value)


@pytest.mark.parametrize(
    ("status", "headers", "says", "again"),
    [
        (401, {}, "HF_TOKEN", False),
        (401, {"x-error-code": "GatedRepo"}, "accept its terms at http://.*/org/tiny", False),
        (403, {"x-error-message": "not for you"}, r"status 403 \(not for you\)", False),
        (404, {}, "check it, and HF_ENDPOINT", False),
        (429, {"retry-after": "7"}, "busy", True),
        (503, {}, "busy or broken: status 503", True),
        (418, {}, "HF_ENDPOINT", False),
    ],
)
def test_a_hub_that_refuses_is_quoted_with_what_to_do(
    tmp_path: Path, status: int, headers: dict[str, str], says: str, again: bool
) -> None:
    with Hub({REPO: files(1000)}) as hub:
        hub.statuses = [(status, headers)]
        with pytest.raises(Refused, match=says) as refused:
            pull(hub.url, tmp_path)
    failure = refused.value.failure
    assert failure.code is ErrorCode.HUB
    assert (failure.retry_after_s is not None) == again
    if "retry-after" in headers:
        assert failure.retry_after_s == 7.0


@pytest.mark.parametrize(
    ("repo", "revision", "code", "says"),
    [
        ("org/none", "", ErrorCode.HUB, "has no model org/none, or it is private"),
        (REPO, "v9", ErrorCode.HUB, "no such revision"),
        (REPO, "../v9", ErrorCode.INVALID_REQUEST, "cannot be a revision"),
        ("a/b/c", "", ErrorCode.INVALID_REQUEST, "write org/name"),
        ("../etc", "", ErrorCode.INVALID_REQUEST, "write org/name"),
    ],
)
def test_a_name_that_leads_nowhere_is_named(
    tmp_path: Path, repo: str, revision: str, code: ErrorCode, says: str
) -> None:
    with Hub({REPO: files(1000)}) as hub, pytest.raises(Refused, match=says) as refused:
        pull(hub.url, tmp_path, repo=repo, revision=revision)
    assert refused.value.failure.code is code
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "name", ["../../evil.json", "/etc/evil.json", "a/../b.json", "a\\..\\b.json", "C:/b.json"]
)
def test_a_file_name_that_leads_out_of_the_cache_is_refused(tmp_path: Path, name: str) -> None:
    with Hub({REPO: files(1000)}) as hub:
        hub.names["config.json"] = name
        with pytest.raises(Refused, match="no such name is written to the disk"):
            pull(hub.url, tmp_path)
    assert not list(tmp_path.rglob("*evil*"))


def test_a_hash_that_is_a_path_is_refused(tmp_path: Path) -> None:
    with Hub({REPO: files(1000)}) as hub:
        hub.hashes["config.json"] = "../../evil"
        with pytest.raises(Refused, match="no usable hash for config"):
            pull(hub.url, tmp_path)


def test_a_repository_without_weights_for_us_says_what_it_has(tmp_path: Path) -> None:
    with (
        Hub({REPO: {"config.json": b"{}", "model.gguf": b"x"}}) as hub,
        pytest.raises(Refused, match=r"no safetensors weights \(its files: .gguf, .json\).*mlxd import"),
    ):
        pull(hub.url, tmp_path)


def test_a_server_that_is_no_hub_is_told_from_one(tmp_path: Path) -> None:
    with Hub({REPO: files(1000)}) as hub:
        hub.statuses = [(200, {})]
        with pytest.raises(Refused, match="does not answer as a model hub does"):
            pull(hub.url, tmp_path)


def test_a_disk_without_room_is_refused_with_the_numbers_before_a_byte_is_fetched(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub:
        with pytest.raises(Refused, match=r"605 kB to download and \d+ TB to stay free, but only") as refused:
            pull(hub.url, tmp_path, floor=1 << 60)
        assert refused.value.failure.code is ErrorCode.DISK_FULL
        assert hub.sent == {}


def test_the_token_goes_to_the_hub_and_nowhere_else(tmp_path: Path) -> None:
    with Hub({REPO: files()}, token=TOKEN) as hub:
        with pytest.raises(Refused, match="HF_TOKEN"):
            pull(hub.url, tmp_path)
        hub.requests.clear()
        told: list[object] = []
        asyncio.run(
            run_job(
                PullRepo(repo=REPO, floor_bytes=0),
                "",
                on_event=told.append,
                worker_env=environment(hub.url, tmp_path, TOKEN),
            )
        )
        by_host = {
            host: {seen.authorization for seen in hub.requests if seen.host == host}
            for host in ("hub", "cdn")
        }
        assert by_host == {"hub": {f"Bearer {TOKEN}"}, "cdn": {""}}
        assert TOKEN not in repr(told)
        for file in tmp_path.rglob("*"):
            assert not file.is_file() or TOKEN.encode() not in file.read_bytes()


def test_a_pull_whose_worker_is_killed_tells_no_signed_address(tmp_path: Path) -> None:
    """The other host's address is as good as a key to the file."""

    async def main(hub: Hub) -> None:
        env = environment(hub.url, tmp_path)
        work = asyncio.ensure_future(run_job(PullRepo(repo=REPO, floor_bytes=0), "", worker_env=env))
        await asyncio.to_thread(hub.held.wait, 30)
        (worker,) = psutil.Process().children()
        worker.kill()
        with pytest.raises(Refused) as refused:
            await work
        assert str(refused.value) == "the job's worker was killed by SIGKILL before it was done"

    with Hub({REPO: files()}) as hub:
        hub.hold[WEIGHTS] = 300_000
        asyncio.run(main(hub))
        assert any(seen.host == "cdn" for seen in hub.requests)


@pytest.mark.parametrize("level", ["info", "debug"])
def test_a_worker_logs_no_signed_address(tmp_path: Path, level: str) -> None:
    async def main(hub: Hub) -> None:
        launch = control.LaunchJob(job_id="x", spec=PullRepo(repo=REPO, floor_bytes=0))

        def hear(message: control.FromWorker) -> None:
            if isinstance(message, control.Hello):
                channel.send(launch)

        env = launcher.worker_environment(environment(hub.url, tmp_path) | {"MLXD_LOG_LEVEL": level})
        process, end = launcher.start(launcher.default_command(), environment=env, socket_path=None)
        channel = Channel(hear)
        await channel.open(end)
        assert await process.exited == 0
        await process.output_ended(5)
        channel.close()
        assert not [line for line in process.lines if "?" in line or "s3cret" in line]

    with Hub({REPO: files()}) as hub:
        asyncio.run(main(hub))
        assert any(seen.host == "cdn" for seen in hub.requests)


def test_a_hub_that_repeats_the_token_does_not_get_it_printed(tmp_path: Path) -> None:
    with Hub({REPO: files(1000)}, token=TOKEN) as hub:
        hub.statuses = [(403, {"x-error-message": f"token {TOKEN} is not allowed"})]
        with pytest.raises(Refused, match="token … is not allowed"):
            pull(hub.url, tmp_path, token=TOKEN)


def test_nothing_is_asked_of_anybody_offline(tmp_path: Path) -> None:
    with Hub({REPO: files(1000)}) as hub:
        env = environment(hub.url, tmp_path) | {"HF_HUB_OFFLINE": "1"}
        with pytest.raises(Refused, match="HF_HUB_OFFLINE is set"):
            asyncio.run(run_job(PullRepo(repo=REPO), "", worker_env=env))
        assert hub.requests == []


def test_while_it_runs_only_the_marker_shows_and_a_second_process_is_refused(tmp_path: Path) -> None:
    async def main(hub: Hub) -> None:
        env = environment(hub.url, tmp_path)
        first = asyncio.ensure_future(run_job(PullRepo(repo=REPO, floor_bytes=0), "", worker_env=env))
        await asyncio.to_thread(hub.held.wait, 30)
        assert (cache_of(tmp_path) / ".mlxd-pulling").read_text() == hub.commit(REPO)
        assert not (cache_of(tmp_path) / "snapshots").exists()
        with pytest.raises(Refused, match="another process downloads to") as refused:
            await run_job(PullRepo(repo=REPO, floor_bytes=0), "", worker_env=env)
        assert refused.value.failure.code is ErrorCode.CONFLICT
        hub.release.set()
        await first
        assert not (cache_of(tmp_path) / ".mlxd-pulling").exists()

    with Hub({REPO: files()}) as hub:
        hub.hold[WEIGHTS] = 300_000
        asyncio.run(main(hub))


def test_a_cancelled_pull_keeps_what_it_has(tmp_path: Path) -> None:
    async def main(hub: Hub) -> None:
        work = asyncio.ensure_future(
            run_job(PullRepo(repo=REPO, floor_bytes=0), "", worker_env=environment(hub.url, tmp_path))
        )
        await asyncio.to_thread(hub.held.wait, 30)
        await asyncio.to_thread(until, lambda: part_of(tmp_path), "a part of the weights")
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    with Hub({REPO: files()}) as hub:
        hub.hold[WEIGHTS] = 300_000
        asyncio.run(main(hub))
        assert (cache_of(tmp_path) / "blobs" / git_hash(files()["config.json"])).exists()
        part = part_of(tmp_path)
        assert part is not None
        here = part.stat().st_size
        hub.release.set()
        hub.hold.clear()
        pull(hub.url, tmp_path)
        assert hub.starts(WEIGHTS) == [0, here]


def test_a_pull_loads_no_mlx_and_its_library_calls_nobody_else() -> None:
    script = (
        "import sys, worker.__main__, worker.jobs.pull_repo; from huggingface_hub import constants as c\n"
        "print(*sys.modules); assert c.HF_HUB_DISABLE_TELEMETRY and c.HF_HUB_DISABLE_XET"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in said.stdout.split()}
    assert loaded.isdisjoint({"mlx", "numpy", "tokenizers", "hf_xet", "torch", "parent"})


def test_a_worker_that_waits_for_a_silent_hub_keeps_saying_that_it_lives(tmp_path: Path) -> None:
    async def main(hub: Hub) -> None:
        beats = asyncio.Semaphore(0)
        stages: list[str] = []
        launch = control.LaunchJob(job_id="x", spec=PullRepo(repo=REPO, floor_bytes=0))

        def hear(message: control.FromWorker) -> None:
            match message:
                case control.Hello():
                    channel.send(launch)
                case control.Heartbeat():
                    beats.release()
                case control.JobUpdate(event=JobStage(stage=stage)):
                    stages.append(stage)

        env = launcher.worker_environment(environment(hub.url, tmp_path))
        process, end = launcher.start(launcher.default_command(), environment=env, socket_path=None)
        channel = Channel(hear)
        await channel.open(end)
        await asyncio.to_thread(hub.held.wait, 30)
        before = len(stages)
        for _ in range(3):
            async with asyncio.timeout(30):
                await beats.acquire()
        assert len(stages) <= before + 1  # nothing else was said
        channel.close()
        await process.exited

    with Hub({REPO: files()}) as hub:
        hub.hold[WEIGHTS] = 300_000
        asyncio.run(main(hub))
