"""`POST /api/pull`: lines of progress up to the end, a pull under way is joined, failures have Ollama's shape."""

import json
from pathlib import Path
from typing import Any

from tests.fakes.hub import Hub
from tests.process.pulling import NEEDED, REPO, WEIGHTS, files
from tests.process.test_pull_server import Server, held, serving

SIZE = sum(len(files()[path]) for path in NEEDED)


def lines(server: Server, model: str) -> list[dict[str, Any]]:
    answer = server.http.post("/api/pull", json={"model": model})
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def test_an_ollama_pull_tells_its_progress_and_success(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        first, *between, last = lines(server, f"hf.co/{REPO}:latest")
        assert (first, last) == ({"status": "pulling manifest"}, {"status": "success"})
        assert all(each.get("completed", 0) <= each["total"] <= SIZE for each in between if "total" in each)
        again = server.http.post("/api/pull", json={"name": REPO, "stream": False})
        assert (again.status_code, again.json()) == (200, {"status": "success"})


def test_an_ollama_pull_joins_the_one_under_way(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        hub.hold[WEIGHTS] = 300_000
        job_id = server.pull()
        held(hub, tmp_path)
        with server.http.stream("POST", "/api/pull", json={"model": REPO}) as answer:
            told = answer.iter_lines()
            assert json.loads(next(told)) == {"status": "pulling manifest"}
            hub.release.set()
            assert [json.loads(line) for line in told][-1] == {"status": "success"}
        assert server.wait(job_id, "done")["id"] == job_id


def test_an_ollama_pull_of_what_is_not_there_ends_with_its_error(tmp_path: Path) -> None:
    with Hub({REPO: files()}) as hub, serving(tmp_path, hub) as server:
        assert list(lines(server, "org/nothing")[-1]) == ["error"]
        whole = server.http.post("/api/pull", json={"model": "org/nothing", "stream": False})
        assert whole.status_code >= 400
        assert list(whole.json()) == ["error"]
        assert server.http.post("/api/pull", json={"model": "llama3.2"}).status_code == 400
