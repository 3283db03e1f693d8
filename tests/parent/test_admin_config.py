"""`GET` and `PATCH /admin/config`, called as the ASGI apps that they are."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from parent.admin.config import MOST_BYTES, Config, schema_of
from parent.config import Settings, fields
from parent.library.catalog import ModelEntry
from parent.library.names import Found, Names
from parent.live_config import LiveConfig
from parent.model_options import ModelOptions
from parent.values import fields_of
from shared.errors import ErrorCode, Refused


def config(folder: Path, text: str = "") -> Config:
    (folder / "mlxd.toml").write_text(text)
    names = Names([ModelEntry(id="a/b", path=folder, aliases=["card"])], {})

    async def known(name: str) -> Found:
        return names.resolve(name)

    return Config(LiveConfig({"data_dir": str(folder), "max_rows": "5"}, {}, home=folder), known)


def call(app: Any, body: bytes = b"") -> tuple[int, dict[str, Any]]:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "path_params": {}}, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_what_is_in_force_is_shown_with_its_origin_and_its_form(tmp_path: Path) -> None:
    text = 'queue_limit = 3\n[models."a/b"]\naliases = ["s"]\n[models."a/b".profiles.p]\ntop_k = 4\n'
    status, shown = call(config(tmp_path, text).show)
    assert status == 200
    assert shown["file"] == str(tmp_path / "mlxd.toml")
    assert list(shown["values"]) == list(shown["origins"]) == list(fields())
    assert (shown["values"]["queue_limit"], shown["origins"]["queue_limit"]) == (3, shown["file"])
    assert (shown["values"]["max_rows"], shown["origins"]["max_rows"]) == (5, "flag --max-rows")
    assert shown["models"] == {"a/b": {"aliases": ["s"], "profiles": {"p": {"top_k": 4}}}}
    assert shown["pending"] == {}


@pytest.mark.parametrize("struct", [Settings, ModelOptions])
def test_the_schema_says_of_every_setting_what_it_is_and_needs(struct: Any) -> None:
    schema = schema_of(struct)
    assert list(schema["properties"]) == list(fields_of(struct))
    for name, known in fields_of(struct).items():
        about = schema["properties"][name]
        assert about["needs"] == known.needs
        assert about.get("unit", "") == known.unit
        assert [each for each in about.get("enum", []) if each is not None] == list(known.choices)
        assert known.description in json.dumps(about)


def test_needs_are_those_of_the_running_server() -> None:
    needs = {name: known.needs for name, known in fields().items()}
    for name in ("host", "port", "data_dir", "allowed_hosts", "model"):
        assert needs[name] == "restart"
    for name in (
        "dtype",
        "max_context",
        "prefill_chunk",
        "max_rows",
        "prefix_cache_bytes",
        "kv_bytes",
        "blas",
    ):
        assert needs[name] == "model reload"
    for name in ("max_resident", "memory_budget_bytes", "keep_alive_s", "burst_s", "starve_s", "queue_limit"):
        assert needs[name] == "nothing"


def test_a_patch_is_in_force_and_says_what_became_of_each_value(tmp_path: Path) -> None:
    admin = config(tmp_path, "# mine\n")
    body = json.dumps({"queue_limit": 9, "max_rows": 6, "models": {"a/b": {"pin": True}}}).encode()
    status, answer = call(admin.patch, body)
    assert status == 200
    limit, rows, model = answer["results"]
    assert (limit["name"], limit["effective"], limit["needs"]) == ("queue_limit", 9, "nothing")
    assert (rows["value"], rows["effective"], rows["origin"]) == (6, 5, "flag --max-rows")
    assert (model["name"], model["effective"]) == ("models.a/b", {"pin": True})
    assert admin.live.settings.queue_limit == 9
    assert (tmp_path / "mlxd.toml").read_text().startswith("# mine\n")
    assert call(admin.show)[1]["values"]["queue_limit"] == 9


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({"fallback": "ghost"}, "there is no model 'ghost' now"),
        ({"fallback": "a/b"}, ""),
        ({"fallback": "b"}, ""),
        ({"fallback": "resident"}, ""),
        ({"fallback": ""}, ""),
        ({"fallback": None}, ""),
        ({"model": "ghost"}, "in force after a restart; there is no model 'ghost' now"),
        ({"model": "/"}, "in force after a restart"),
        ({"models": {"ghost": {"pin": True}}}, "there is no model 'ghost' now"),
        ({"models": {"ghost": None}}, ""),
        ({"models": {"a/b": {}}}, ""),
        ({"models": {"card": {}}}, ""),
        ({"models": {"b": {}}}, "there is no model of the id 'b' now; did you mean a/b?"),
        ({"queue_limit": 5}, ""),
    ],
)
def test_a_model_that_is_not_there_may_be_named_and_is_told(
    tmp_path: Path, values: dict[str, Any], note: str
) -> None:
    status, answer = call(config(tmp_path).patch, json.dumps(values).encode())
    assert (status, [each["note"] for each in answer["results"]]) == (200, [note])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
        (b'{"port": "\\ud800"}', None),
        (b'{"prot": 1}', "prot"),
        (b'{"queue_limit": 0}', "queue_limit"),
        (b'{"queue_limit": 2, "models": {"x": {"max_rows": -1}}}', "models.x.max_rows"),
        (
            b'{"models": {"x": {"profiles": {"p": {"template_kwargs": '
            + b'{"a":' * 5000
            + b"1"
            + b"}" * 5004,
            None,
        ),
    ],
)
def test_a_bad_patch_is_refused_and_changes_nothing(tmp_path: Path, body: bytes, param: str | None) -> None:
    admin = config(tmp_path, "queue_limit = 3\n")
    with pytest.raises(Refused) as caught:
        call(admin.patch, body)
    assert (caught.value.failure.code, caught.value.failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert (tmp_path / "mlxd.toml").read_text() == "queue_limit = 3\n"
    assert admin.live.settings.queue_limit == 3


def test_a_body_over_the_limit_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        call(config(tmp_path).patch, b" " * (MOST_BYTES + 1))
    assert caught.value.failure.code == ErrorCode.TOO_LARGE


def test_patches_that_come_together_are_all_in_the_file(tmp_path: Path) -> None:
    admin = config(tmp_path)
    names = ["queue_limit", "max_resident", "burst_requests", "restart_budget"]

    async def one(name: str) -> None:
        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps({name: 7}).encode()}

        async def send(message: Any) -> None:
            assert message.get("status", 200) == 200

        await admin.patch({"type": "http"}, receive, send)

    async def all_of_them() -> None:
        await asyncio.gather(*map(one, names))

    asyncio.run(all_of_them())
    assert [getattr(admin.live.settings, name) for name in names] == [7] * 4
