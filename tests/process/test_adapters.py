"""Adapters over the wire: mounted when asked for, once; mounted again after a death; counted, refused, listed."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import write_mlx
from tests.process.harness import Served, chat, content, served, until

F32 = np.float32
SHAPES = {"q_proj": (8, 8), "o_proj": (8, 8)}
MODEL = "org/fake-1b"


def write_adapter(tmp_path: Path, name: str, rank: int = 4, **config: Any) -> Path:
    """For the fake model, whose name it says: the fake has no shapes."""
    pairs = {
        f"model.layers.0.self_attn.{leaf}": (np.ones((ins, rank), F32), np.ones((rank, out), F32))
        for leaf, (out, ins) in SHAPES.items()
    }
    return write_mlx(tmp_path / "data" / "adapters" / name, pairs, **{"base_model": MODEL, **config})


def mounts(server: Served) -> list[str]:
    return [entry["key"].partition("@")[0] for entry in server.journal("mount")]


def mounted(server: Served) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = server.http.get("/v1/adapters").json()["adapters"]
    return rows


def test_an_adapter_is_mounted_once_before_the_first_request_that_asks_for_it(tmp_path: Path) -> None:
    write_adapter(tmp_path, "a")
    write_adapter(tmp_path, "b")
    with served(tmp_path) as server:
        assert server.ask("hi").json()["model"] == MODEL
        assert mounts(server) == []
        with ThreadPoolExecutor(12) as threads:
            answers = list(threads.map(lambda n: server.ask(f"q {n}", model="fake:a"), range(12)))
        assert [answer.status_code for answer in answers] == [200] * 12
        assert {answer.json()["model"] for answer in answers} == {"fake:a"}
        assert mounts(server) == ["a"]
        assert server.ask("hi", adapter=["a", "b"]).json()["model"] == f"{MODEL}:a+b"
        assert mounts(server) == ["a", "b"]
        [first, second] = sorted(mounted(server), key=lambda row: row["id"])
        assert (first["id"], first["model"], first["ram_bytes"]) == ("a", MODEL, 4096)
        assert second["in_use"] == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat("x", model="fake", adapter="a")),
        ("/v1/chat/completions", chat("x", model="fake", adapters=["a"])),
        ("/v1/completions", {"model": "fake:a", "prompt": "x"}),
        ("/v1/responses", {"model": "fake", "input": "x", "adapter": "a"}),
        (
            "/v1/messages",
            {"model": "fake:a", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]},
        ),
        ("/api/chat", {"model": "fake:a", "messages": [{"role": "user", "content": "x"}], "stream": False}),
    ],
)
def test_every_protocol_can_ask_for_an_adapter(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    write_adapter(tmp_path, "a")
    with served(tmp_path) as server:
        answer = server.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == "fake:a"
        assert mounts(server) == ["a"]


def test_profiles_and_options_name_adapters_and_a_request_overrules_them(tmp_path: Path) -> None:
    for name in ("a", "b", "creative"):
        write_adapter(tmp_path, name)
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "data" / "mlxd.toml").write_text(
        f'[models."{MODEL}"]\nadapter = "a"\n'
        f'[models."{MODEL}".profiles.creative]\nadapter = "b"\n'
        f'[models."{MODEL}".profiles.plain]\nadapter = "none"\n'
    )
    with served(tmp_path) as server:
        asked: list[tuple[dict[str, Any], str]] = [
            ({}, f"{MODEL}:a"),
            ({"model": "fake:creative"}, "fake:creative"),
            ({"model": "fake:plain"}, "fake:plain"),
            ({"model": "fake", "adapter": "none"}, "fake"),
            ({"model": "fake", "adapter": "b+a"}, "fake:b+a"),
            ({"model": "fake:none"}, "fake:none"),
        ]
        for fields, named in asked:
            assert server.ask("hi", **fields).json()["model"] == named
        requests = [entry["adapters"] for entry in server.journal("request")]
        assert [[key.partition("@")[0] for key in keys] for keys in requests] == [
            ["a"],
            ["b"],
            [],
            [],
            ["b", "a"],
            [],
        ]


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"model": "fake:poetry"}, 404, "did you mean poems?"),
        ({"adapter": "poetry"}, 404, "did you mean poems?"),
        ({"model": "fake:foreign"}, 400, "made for second"),
        ({"adapter": "foreign"}, 400, "made for second"),
        ({"model": "fake:poems", "adapter": "none"}, 400, "write one of them"),
        ({"adapter": "poems", "adapters": ["other"]}, 400, "must not say something else"),
        ({"adapter": "a:b"}, 400, "must be the name of an adapter"),
        ({"adapter": 5}, 400, "Expected"),
        ({"adapter": ["x"] * 9}, 400, "at most 8"),
        ({"adapter": "broken-one"}, 400, "refused as told"),
    ],
)
def test_an_adapter_that_cannot_be_had_is_refused_in_one_line(
    fields: dict[str, Any], status: int, said: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, "poems")
    write_adapter(tmp_path, "broken-one")
    write_adapter(tmp_path, "foreign", base_model="second")
    with served(tmp_path, models={"second": {}}) as server:
        answer = server.ask("hi", **fields)
        assert answer.status_code == status
        assert said in answer.json()["error"]["message"]
        assert server.ask("hi").status_code == 200
        assert [row["id"] for row in mounted(server)] == []


def test_what_was_mounted_is_mounted_again_after_a_death_before_a_request_goes_on(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_adapter(tmp_path, name)
    with served(tmp_path, {"tokens": 40, "crash_after": 9, "ms_per_token": 2}) as server:
        server.ask("warm", model="fake:b", max_tokens=3)
        body = server.ask("go on", model="fake:a", stream=True).text
        assert "error" not in body
        assert body.endswith("data: [DONE]\n\n")
        assert len(content(body).split()) == 40
        until(lambda: sorted(mounts(server)) == ["a", "a", "b", "b"], "both again")
        first, again = [entry for entry in server.journal("request") if entry["adapters"][0].startswith("a@")]
        assert again["resume"] == 9
        assert again["adapters"] == first["adapters"]
        order = [
            (line["what"], line.get("key", "").partition("@")[0])
            for line in map(json.loads, (server.model_dir / "journal.ndjson").read_text().splitlines())
        ]
        spawned = [at for at, (what, _) in enumerate(order) if what == "spawned"][1]
        assert order.index(("mount", "a"), spawned) < order.index(("request", ""), spawned)


def test_an_adapter_is_mounted_and_unmounted_by_hand(tmp_path: Path) -> None:
    path = write_adapter(tmp_path, "a")
    with served(tmp_path) as server:
        http = server.http
        row = http.post("/v1/adapters/mount", json={"model": "fake", "path": str(path)}).json()
        assert (row["id"], row["model"], row["rank"], row["mounted_layers"]) == ("a", MODEL, 4, 2)
        [there] = http.get("/v1/adapters/available", params={"model": "fake"}).json()["adapters"]
        assert (there["id"], there["mounted"], there["compatible"]) == ("a", [MODEL], [MODEL])
        gone = http.post("/v1/adapters/unmount", json={"adapter": "a"}).json()
        assert gone == {"id": "a", "models": [MODEL]}
        assert mounted(server) == []
        assert [entry["key"].partition("@")[0] for entry in server.journal("unmount")] == ["a"]
        refusals: list[tuple[str, dict[str, str], int]] = [
            ("unmount", {"adapter": "a"}, 404),
            ("mount", {"path": "/etc"}, 403),
            ("mount", {"adapter": "zzz"}, 404),
            ("mount", {}, 400),
            ("mount", {"adapter": "a", "path": str(path)}, 400),
            ("mount", {"adapters": "a"}, 400),
        ]
        for what, body, status in refusals:
            answer = http.post(f"/v1/adapters/{what}", json=body)
            assert answer.status_code == status, body


def test_an_adapter_that_changed_takes_the_place_of_what_it_was(tmp_path: Path) -> None:
    write_adapter(tmp_path, "a")
    with served(tmp_path) as server:
        server.ask("hi", adapter="a")
        write_adapter(tmp_path, "a", rank=2)
        server.ask("hi", adapter="a")
        first, second = [entry["key"] for entry in server.journal("mount")]
        assert first != second
        until(lambda: [entry["key"] for entry in server.journal("unmount")] == [first], "the old one goes")
        assert len(mounted(server)) == 1


def test_the_bytes_of_adapters_are_in_the_ledger_and_what_does_not_fit_is_refused_with_numbers(
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path, "a")
    write_adapter(tmp_path, "huge", rank=16384)
    with served(tmp_path) as server:
        server.ask("hi", adapter="a")
        [account] = server.ledger()["accounts"].values()
        before = account["grant"]["transient"]
        server.http.post("/v1/adapters/unmount", json={"adapter": "a"})
        [account] = server.ledger()["accounts"].values()
        assert before - account["grant"]["transient"] == 4096
        least = account["grant"]["weights"] + account["grant"]["transient"]
        server.http.patch("/admin/config", json={"memory_budget_bytes": least + (1 << 20)})
        answer = server.ask("hi", adapter="huge")
        assert answer.status_code == 507
        assert "adapter huge needs" in answer.json()["error"]["message"]
        assert "memory_budget_bytes" in answer.json()["error"]["message"]
        assert mounts(server) == ["a"]


def test_models_are_listed_with_the_adapters_that_they_can_run_with(tmp_path: Path) -> None:
    write_adapter(tmp_path, "a")
    write_adapter(tmp_path, "b")
    with served(tmp_path) as server:
        rows = {row["id"]: row for row in server.http.get("/v1/models").json()["data"]}
        assert set(rows) == {MODEL, f"{MODEL}:a", f"{MODEL}:b"}
        assert rows[MODEL]["adapters"] == ["a", "b"]
        assert rows[MODEL]["parent"] is None
        assert rows[f"{MODEL}:a"]["parent"] == MODEL
        assert server.http.get(f"/v1/models/{MODEL}:a+b").json()["id"] == f"{MODEL}:a+b"
        assert server.http.get("/v1/models/fake:zzz").status_code == 404


def test_vectors_are_not_made_with_an_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path, "a")
    with served(tmp_path) as server:
        answer = server.http.post("/v1/embeddings", json={"model": "fake:a", "input": "x"})
        assert answer.status_code == 400
        assert "without adapters" in answer.json()["error"]["message"]


def test_a_restarted_server_finds_the_adapters_of_the_worker_it_adopts(tmp_path: Path) -> None:
    write_adapter(tmp_path, "a")
    with served(tmp_path, adopt_grace_s="20s") as server:
        server.ask("hi", adapter="a")
        server.process.kill()
        server.process.wait()
        pid = server.journal("spawned")[0]["pid"]
        with served(tmp_path, adopt_grace_s="20s") as again:
            again.wait_state("ready")
            assert again.engine()["pid"] == pid
            until(lambda: [row["id"] for row in mounted(again)] == ["a"], "it is known")
            assert again.ask("hi", adapter="a").status_code == 200
            assert mounts(again) == ["a"]
