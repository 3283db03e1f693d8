"""`/v1/models` over a real parent: rows with their state, and Anthropic's own SDK, which sees its shape."""

from pathlib import Path

import anthropic
import pytest

from tests.process.harness import served


def test_rows_of_models_say_what_and_where_they_are(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}}) as server:
        server.wait_state("ready")
        rows = {row["id"]: row for row in server.http.get("/v1/models").json()["data"]}
        assert {name: row["state"] for name, row in rows.items()} == {
            "org/fake-1b": "resident",
            "b": "on_disk",
        }
        first = rows["org/fake-1b"]
        assert (first["object"], first["owned_by"], first["aliases"]) == ("model", "mlxd", ["fake"])
        assert first["context_window"] == first["max_model_len"] == first["context_length"] == 4096
        assert (first["worker"], first["adapters"], first["bytes"]) == ("ready", [], 4)
        assert first["modalities"] == {"input": ["text"], "output": ["text"]}
        assert "completion" in first["capabilities"]
        assert "/v1/models" in {row["path"] for row in server.http.get("/v1").json()["routes"]}


def test_anthropic_clients_get_models_in_their_shape(tmp_path: Path) -> None:
    with served(tmp_path, {}, {"b": {}, "c": {}}) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
        assert [model.id for model in client.models.list(limit=2)] == ["b", "c", "org/fake-1b"]
        one = client.models.retrieve("fake")
        assert (one.id, one.type, one.max_input_tokens) == ("org/fake-1b", "model", 4096)
        with pytest.raises(anthropic.NotFoundError, match="nobody"):
            client.models.retrieve("nobody")
        with pytest.raises(anthropic.BadRequestError, match="limit"):
            client.models.list(limit=5000)
        client.close()
