"""Adapters with the real worker on a tiny model: text, a kill in mid-stream, merge, export, fuse, the command."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adapters import ALL, random_pairs, write_mlx, write_peft
from tests.e2e.real import serving
from tests.oracles.checkpoints import write_case
from tests.process.harness import DEADLINE_S, ROOT, Served, chat, content, until


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_case("llama_tied", tmp_path_factory.mktemp("model") / "tiny")


def write_adapters(tiny: Path, data: Path) -> None:
    folder = data / "adapters"
    write_mlx(folder / "first", random_pairs(tiny, ALL, seed=1), scale=0.4, base_model="tiny")
    write_peft(folder / "second", random_pairs(tiny, seed=2), alpha=2, base_model_name_or_path=str(tiny))
    other = {"model.layers.0.self_attn.q_proj": random_pairs(tiny, ("down_proj",)).popitem()[1]}
    write_mlx(folder / "misshapen", other, base_model="tiny")


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    write_adapters(tiny, folder / "data")
    with serving(tiny, folder) as running:
        running.wait_state("ready")
        yield running


def said(server: Served, model: str, text: str = "the cat and the hat", **more) -> str:
    body = {"prompt": text, "model": model, "max_tokens": 24, "temperature": 0, **more}
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def test_each_adapter_says_what_it_says_and_the_model_what_it_said(server: Served) -> None:
    base = said(server, "tiny")
    texts = {name: said(server, f"tiny:{name}") for name in ("first", "second", "first+second")}
    assert len({base, *texts.values()}) == 4
    assert said(server, "tiny") == base
    assert {name: said(server, f"tiny:{name}") for name in texts} == texts
    answer = server.ask("hi", model="tiny", adapter="misshapen")
    assert answer.status_code == 400
    assert "does not fit tiny" in answer.json()["error"]["message"]
    assert said(server, "tiny") == base


def test_a_stream_with_an_adapter_survives_kill_minus_nine_with_the_same_text(server: Served) -> None:
    asked = chat("tell me more", stream=True, model="tiny:first+second", max_tokens=400, temperature=0.8)
    whole = content(server.http.post("/v1/chat/completions", json=asked).text)
    restarts = server.engine()["restarts"]
    body = ""
    with server.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        for line in answer.iter_lines():
            body += line + "\n"
            if len(content(body)) > 20 and server.engine()["restarts"] == restarts:
                os.kill(server.engine()["pid"], signal.SIGKILL)
                until(lambda: server.engine()["restarts"] > restarts, "a new worker")
    assert "error" not in body
    assert content(body) == whole
    # The answer may have been over before the kill; a second one is the new worker's for sure.
    assert content(server.http.post("/v1/chat/completions", json=asked).text) == whole
    rows = server.http.get("/v1/adapters").json()["adapters"]
    assert {"first", "second"} <= {row["id"] for row in rows if row["mounted_layers"]}


def test_adapters_are_merged_and_exported(server: Served) -> None:
    http = server.http
    merged = http.post(
        "/api/finetune/merge", json={"adapter_a": "first", "adapter_b": "second", "name": "both"}
    )
    assert merged.status_code == 200, merged.text
    assert merged.json()["stats"]["rank"] == 8
    assert said(server, "tiny:both") == said(server, "tiny:first+second")
    again = http.post(
        "/api/finetune/merge", json={"adapter_a": "first", "adapter_b": "second", "name": "both"}
    )
    assert again.status_code == 409
    outside = http.post("/api/finetune/merge", json={"adapter_a": "/etc", "adapter_b": "second"})
    assert outside.status_code == 403
    unknown = http.post("/api/finetune/merge", json={"adapter_a": "firsty", "adapter_b": "second"})
    assert unknown.status_code == 404
    body = {"base_model": "tiny", "adapter_path": "second", "method": "sft"}
    exported = http.post("/api/finetune/export", json=body).json()
    assert exported["ok"] is True
    folder = Path(exported["export_path"])
    assert folder == server.data_dir / "exports" / "second"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == exported["manifest"]
    assert (manifest["base_model"], manifest["rank"], manifest["method"]) == ("tiny", 4, "sft")
    assert {file["name"] for file in manifest["files"]} == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    assert http.post("/api/finetune/export", json=body).status_code == 409


def test_adapters_are_listed_fused_and_deleted_by_commands(
    tiny: Path, server: Served, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    write_adapters(tiny, data)
    shutil.copytree(tiny, data / "models" / "tiny")
    (data / "adapters" / "second" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 2})
    )

    def mlxd(*words: str, code: int = 0) -> str:
        environment = {**os.environ, "MLXD_DATA_DIR": str(data), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-P", "-m", "parent", *words],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S * 4,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    listed = {row["id"]: row["models"] for row in json.loads(mlxd("adapters", "--json"))}
    assert listed == {"first": ["tiny"], "misshapen": ["tiny"], "second": ["tiny"]}
    assert "first" in mlxd("adapters")
    assert "is ready" in mlxd("fuse", "tiny", "first+second", "--name", "my/fused")
    assert "exists; choose another name" in mlxd("fuse", "tiny", "first", "--name", "my/fused", code=1)
    assert "does not fit" in mlxd("fuse", "tiny", "misshapen", "--name", "other", code=2)
    with serving(data / "models" / "my" / "fused", tmp_path / "data") as fused:
        fused.wait_state("ready")
        assert said(fused, "fused") == said(server, "tiny:first+second")
    assert "is deleted" in mlxd("adapters", "rm", "first", "--yes")
    assert "there is second" not in mlxd("adapters", "rm", "first", "--yes", code=1)
    assert not (data / "adapters" / "first").exists()
