"""The lab of a real server on a tiny model: measurements, data sets by its own API, pushes, what of the disk may go."""

import asyncio
import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parent.jobs.run import run_job
from shared.lab import Dataset
from shared.lab_templates import TEMPLATES
from tests.adapters import ALL, random_pairs, write_mlx
from tests.e2e.real import serving
from tests.fakes.hub import Hub
from tests.oracles.checkpoints import write_case
from tests.parent.hf_caches import HfCache
from tests.process.harness import ROOT, Served, until

NEW, OLD, OLDER = "a" * 40, "b" * 40, "c" * 40
MODEL = "org/cached"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case("llama_tied", tmp_path_factory.mktemp("model") / "tiny")


def ask(server: Served, method: str, path: str, body: Any = None, status: int = 200) -> Any:
    answer = server.http.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def refused(server: Served, path: str, body: Any, status: int = 400) -> tuple[str, str]:
    """(field, message)."""
    error = ask(server, "POST", path, body, status)["error"]
    return error["param"], error["message"]


def ended(server: Served, job_id: str) -> dict[str, Any]:
    """The job, once it is over."""

    def look() -> dict[str, Any] | None:
        job: dict[str, Any] = ask(server, "GET", f"/api/jobs/{job_id}")["job"]
        return job if job["status"] in ("done", "failed", "cancelled", "lost") else None

    return until(look, f"{job_id} to end", 60.0)


def measure(server: Served, **body: Any) -> dict[str, Any]:
    job = ended(server, ask(server, "POST", "/api/evaluations", body, 202)["job_id"])
    assert job["status"] == "done", job
    return until(
        lambda: next(
            (
                one
                for one in ask(server, "GET", "/api/evaluations")["evaluations"]
                if one["job_id"] == job["id"]
            ),
            None,
        ),
        "the result to be kept",
    )


def mlxd(server: Served, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "parent", *words, "--data-dir", str(server.data_dir)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_lab_measures_models_and_compares_them(tiny: Path, tmp_path: Path) -> None:
    write_mlx(tmp_path / "data" / "adapters" / "mine", random_pairs(tiny, ALL, seed=1), base_model="tiny")
    small = {"num_samples": 2, "sequence_length": 16}
    with serving(tiny, tmp_path) as server:
        server.wait_state("ready")
        first = measure(server, kind="evaluate", model="tiny", **small)
        assert (first["model"], first["kind"], first["before"]) == ("tiny", "evaluate", None)
        assert first["what"].items() >= small.items()
        second = measure(server, model="tiny", reference="tiny", adapter="mine", **small)
        assert second["model"] == "tiny:mine"
        assert second["numbers"]["reference_perplexity"] == first["numbers"]["perplexity"]
        assert second["numbers"]["kl_mean"] > 0
        again = measure(server, model="tiny", **small)
        assert (
            again["before"]["perplexity"] == first["numbers"]["perplexity"] == again["numbers"]["perplexity"]
        )

        speed = measure(
            server,
            kind="benchmark",
            model="tiny",
            prompt_tokens=[8],
            streams=[1, 2],
            completion_tokens=4,
            rounds=1,
        )
        assert {"ttft_s/8x1", "total_tps/8x2"} <= speed["numbers"].keys()
        assert len(speed["details"]["points"]) == 2
        found = ask(server, "GET", "/api/evaluations?kind=evaluate&model=tiny&limit=5")["evaluations"]
        assert [one["id"] for one in found] == [again["id"], first["id"]]

        for body, field, said in (
            ({"kind": "x"}, "kind", "must be evaluate or benchmark"),
            ({"url": "http://evil"}, "url", "is no field of evaluate"),
            ({"num_samples": 0}, "num_samples", "num_samples: expected `int` >= 1"),
            ({"model": 3}, "model", "must be the name of a model"),
            ({"model": "tiny", "data": "/etc"}, "data", "is no data set"),
            ({"kind": "benchmark", "streams": []}, "streams", "length >= 1"),
        ):
            name, message = refused(server, "/api/evaluations", body)
            assert (name, said in message) == (field, True), message
        assert refused(server, "/api/evaluations", {"model": "nobody"}, 404)[1]
        assert refused(server, "/api/evaluations", {"kind": "benchmark", "model": "nobody"}, 404)[1]
        assert (
            "limit must be" in ask(server, "GET", "/api/evaluations?limit=0", status=400)["error"]["message"]
        )

        shown = mlxd(server, "eval", "tiny", "--num-samples", "2", "--sequence-length", "16")
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("tiny: perplexity ")
        assert "+0.0%" in shown.stdout
        text = tmp_path / "text.txt"
        text.write_text("the harbour keeper counted the waves " * 20)
        told = mlxd(server, "eval", str(tiny), "--data", str(text), "--sequence-length", "16", "--json")
        assert told.returncode == 0, told.stderr
        assert json.loads(told.stdout)[0]["what"]["data"] == str(text)
        speeds = mlxd(
            server,
            *("bench", "tiny", "--prompt-tokens", "8", "--streams", "1", "--completion-tokens", "4"),
            *("--rounds", "1"),
        )
        assert "decode_tps/8x1" in speeds.stdout, speeds.stderr
        assert "tokens/s" in mlxd(server, "bench", "--history").stdout
        assert "no list of whole numbers" in mlxd(server, "bench", "tiny", "--streams", "a").stderr
    history = mlxd(server, "eval", "--history", "--json")
    assert len(json.loads(history.stdout)) == 5


def test_a_dataset_is_written_by_the_server_s_own_api(tiny: Path, tmp_path: Path) -> None:
    with serving(tiny, tmp_path) as server:
        found = ask(server, "GET", "/api/dataset/templates")["templates"]
        assert [template["id"] for template in found] == list(TEMPLATES)
        assert found[0]["fields"][0] == {
            "name": "pairs_text",
            "type": "textarea",
            "label": "Pairs",
            "hint": "Q: … and A: …, an empty line between two pairs",
            "required": True,
            "default": None,
            "least": None,
            "most": None,
            "choices": [],
        }
        spec = Dataset(
            template="style_transfer",
            inputs={"reference_samples": "a", "raw_text": "\n\n".join("abcdefghij")},
            model="tiny",
            url=server.url,
            streams=4,
        )
        outputs = [tmp_path / "sets" / name for name in ("one", "two")]
        for output in outputs:
            done = asyncio.run(run_job(spec, output))
            assert Path(done.output) == output
    one, two = ((output / "report.json").read_text() for output in outputs)
    assert json.loads(one)["units"] == 10
    assert one == two


def test_the_lab_keeps_a_token_and_pushes_what_jobs_made(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    made = data / "datasets" / "mine"
    made.mkdir(parents=True)
    (made / "train.jsonl").write_text('{"text": "a"}\n')
    with Hub({}, "hf_right") as hub, pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_ENDPOINT", hub.url)
        environment.setenv("NO_PROXY", "*")
        with serving(tiny, tmp_path) as server:
            body = {"repo_id": "org/mine", "source_path": "mine"}
            assert ask(server, "GET", "/api/settings/hf-token") == {"ok": True, "hasToken": False}
            assert refused(server, "/api/dataset/push", body)[0] == "token"
            assert refused(server, "/api/settings/hf-token", {"token": " "})[0] == "token"
            ask(server, "POST", "/api/settings/hf-token", {"token": "hf_right"})
            assert ask(server, "GET", "/api/settings/hf-token") == {"ok": True, "hasToken": True}
            assert stat.S_IMODE((data / "hf-token").stat().st_mode) == 0o600

            answer = ask(server, "POST", "/api/dataset/push", body, 202)
            assert answer["url"] == f"{hub.url}/datasets/org/mine"
            job = ended(server, answer["job_id"])
            assert job["status"] == "done", job
            assert sorted(hub.commits.taken[0]) == ["README.md", "train.jsonl"]

            for path, wrong, field, status in (
                ("/api/dataset/push", body | {"repo_id": "mine"}, "repo_id", 400),
                ("/api/dataset/push", {"repo_id": "org/mine"}, "source_path", 400),
                ("/api/dataset/push", body | {"job_id": "x"}, "source_path", 400),
                ("/api/dataset/push", body | {"source_path": "/etc"}, "source_path", 403),
                ("/api/quantize/push", body, "source_path", 404),
                ("/api/dataset/push", {"repo_id": "org/mine", "job_id": job["id"]}, "job_id", 409),
            ):
                assert refused(server, path, wrong, status)[0] == field
            assert ask(server, "DELETE", "/api/settings/hf-token") == {"ok": True, "hasToken": False}
            everything = json.dumps([ask(server, "GET", "/api/jobs"), ask(server, "GET", "/engine")])
            assert "hf_right" not in everything
    assert "hf_right" not in (tmp_path / "stderr").read_text()


def put(cache: HfCache, folder: Path, commit: str, ref: str = "") -> None:
    """A real model as a snapshot of the cache."""
    for file in sorted(folder.iterdir()):
        cache.file(MODEL, commit, file.name, file.read_bytes())
    cache.file(MODEL, commit, "notes.txt", commit.encode() * 50)
    if ref:
        cache.ref(MODEL, ref, commit)


def test_the_lab_frees_what_newer_snapshots_replaced_and_nothing_in_use(tiny: Path, tmp_path: Path) -> None:
    cache = HfCache(tmp_path / "hub")
    for commit in (OLDER, OLD, NEW):
        put(cache, tiny, commit, "main")

    def size() -> int:
        return sum(
            path.stat().st_size for path in cache.root.rglob("*") if path.is_file() and not path.is_symlink()
        )

    with serving(tiny, tmp_path, "--hf-cache", str(cache.root)) as server:
        server.wait_state("ready")
        loaded = f"{MODEL}@{OLD[:8]}"
        ask(server, "POST", f"/v1/models/{loaded}/load", {"wait": True})
        plan = ask(server, "GET", "/api/gc/plan")
        [one] = plan["superseded"]
        assert one["prune_snapshots"] == [OLDER]
        assert one["skipped_snapshots"] == [{"commit": OLD, "reason": "in use: ready"}]
        assert plan["reclaim_bytes"] == one["reclaim_bytes"] == 2000
        assert refused(server, "/api/gc/execute", {})[0] == "yes"
        before = size()
        done = ask(server, "POST", "/api/gc/execute", {"yes": True})
        assert done == {"ok": True, "snapshots": 1, "blobs": 1, "reclaimed_bytes": 2000}
        assert before - size() == 2000
        assert server.ask("hi", model=loaded, max_tokens=2).status_code == 200
        ids = [row["id"] for row in ask(server, "GET", "/v1/models")["data"]]
        assert f"{MODEL}@{OLDER[:8]}" not in ids
        assert loaded in ids
        ask(server, "POST", f"/v1/models/{loaded}/unload", {"wait": True})
        assert ask(server, "POST", "/api/gc/execute", {"yes": True})["reclaimed_bytes"] == 2000
        assert server.ask("hi", model=MODEL, max_tokens=2).status_code == 200
        assert ask(server, "GET", "/api/gc/plan") == {"ok": True, "superseded": [], "reclaim_bytes": 0}
