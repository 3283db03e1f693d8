"""The walk through the lab of docs/lab.md, word for word but for the model and the port."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.e2e.real import serving
from tests.oracles.checkpoints import write_case
from tests.process.harness import ROOT

MARK = "<!-- walk-through"
CURL = """\
import sys, urllib.request
_, _, url, _, body = sys.argv
print(urllib.request.urlopen("http://" + url, body.encode()).read().decode())
"""


def script() -> str:
    page = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    found = re.search(r"```sh\n(.*?)```", page[page.index(MARK) :], re.DOTALL)
    assert found is not None
    return found[1]


def test_lab_the_walk_through_ends_with_an_adapter_that_has_learned(tmp_path: Path) -> None:
    tiny = write_case("llama_tied", tmp_path / "data" / "models" / "tiny")
    programs = tmp_path / "bin"
    programs.mkdir()
    written = {"mlxd": f'#!/bin/sh\nexec {sys.executable} -P -m parent "$@"\n'}
    if shutil.which("curl") is None:
        written["curl"] = f"#!{sys.executable}\n{CURL}"
    for name, text in written.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with serving(tiny, tmp_path) as server:
        server.wait_state("ready")
        text = script()
        for word, instead in (
            ("starter", "tiny"),
            ("localhost:8080", server.url.removeprefix("http://")),
        ):
            assert word in text
            text = text.replace(word, instead)
        done = subprocess.run(
            ["sh", "-eu", "-c", text],
            cwd=tmp_path,
            env={
                **os.environ,
                "PATH": f"{programs}:{os.environ['PATH']}",
                "MLXD_DATA_DIR": str(server.data_dir),
                "MLXD_HF_CACHE": "none",
                "PYTHONPATH": str(ROOT),
            },
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        begins = [found.start() for found in re.finditer(r'\{"id":"chatcmpl', done.stdout)]
        answers = [json.JSONDecoder().raw_decode(done.stdout, begin)[0] for begin in begins]
        plain, tuned = (each["choices"][0]["message"]["content"] for each in answers)
        assert [each["model"] for each in answers] == ["tiny", "tiny:my-adapter"]
        assert plain != tuned
        job = server.http.get("/api/jobs?kind=finetune").json()["jobs"][0]["id"]
        metrics = server.http.get(f"/api/jobs/{job}/metrics").json()["metrics"]
        losses = [each["loss"] for each in metrics if each["kind"] == "train"]
        assert losses[-1] < losses[0]
