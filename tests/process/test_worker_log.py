"""A server's log has what its workers log, those that it adopted too; the report of an end keeps its last lines."""

import asyncio
import json
import logging
from pathlib import Path

import pytest
from msgspec.structs import replace

from parent.workers.states import State
from tests.oracles.checkpoints import write_case
from tests.process.harness import Served, served, until
from tests.process.supervised import become, down, kill, left, parent, reach, say, supervisor, write_script

DAMAGED = (
    '{"ts":1.5,"level":"warning","logger":"cache","event":"store.damaged","file":"/kv/a","reason":"checksum"}'
)


def lines(server: Served, event: str) -> list[dict]:
    found = [json.loads(line) for line in server.errors().splitlines() if line.startswith("{")]
    return [line for line in found if line["event"] == event]


def test_what_a_worker_logs_is_in_the_servers_log_with_model_and_pid(tmp_path: Path) -> None:
    with served(tmp_path, {"says": [DAMAGED, "Warning: nothing of a log"], "crash_at_load": 1}) as server:
        pid = server.wait_state("ready")["pid"]
        found = until(
            lambda: (
                said if (said := lines(server, "store.damaged"))[-1:] and said[-1]["pid"] == pid else None
            ),
            "its line",
        )
        assert len({line["pid"] for line in found}) == len(found) >= 2
        for line in found:
            assert line["ts"] > 1.5
            assert (line["level"], line["logger"]) == ("warning", "worker.cache")
            assert (line["model"], line["file"], line["reason"]) == ("org/fake-1b", "/kv/a", "checksum")
        assert "nothing of a log" not in server.errors()
        last = server.engine()["last_exit"]["stderr"]
        assert DAMAGED in last
        assert "Warning: nothing of a log" in last


def test_an_adopted_worker_is_heard_as_one_of_our_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_script(tmp_path / "model", {"says": [DAMAGED]})
    kill(parent(tmp_path, model, 10, real=False))
    caplog.set_level(logging.INFO)

    async def main() -> None:
        each = supervisor(tmp_path, model)
        record = left(tmp_path)
        assert await each.adopt(record)
        await reach(each, State.READY)
        assert each.client is not None
        await become(each, lambda: "store.damaged" in caplog.messages, "its line")
        await down(each)
        [said] = [one for one in caplog.records if one.getMessage() == "store.damaged"]
        assert said.__dict__["fields"]["pid"] == record.pid
        assert said.__dict__["fields"]["model"] == "org/fake-1b"

    asyncio.run(main())


def test_what_the_real_worker_logs_of_a_request_is_heard_with_its_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_case("llama_tied", tmp_path / "tiny")
    caplog.set_level(logging.INFO)

    async def main() -> None:
        each = supervisor(tmp_path, model, real=True)
        each.launch = replace(each.launch, check_prefix=True)
        each.want()
        await reach(each, State.READY)
        for text in ("the cat and the hat and the bat " * 4, "the cat and the hat and the bat " * 5):
            await say(each, text, max_tokens=2)
        await become(each, lambda: "prefix.checked" in caplog.messages, "its line")
        [said] = [one for one in caplog.records if one.getMessage() == "prefix.checked"]
        assert (said.name, said.levelname) == ("worker.engine", "INFO")
        fields = said.__dict__["fields"]
        assert (fields["model"], fields["pid"]) == ("org/fake-1b", each.pid)
        assert 0 < fields["reused"] < fields["prompt_tokens"]
        assert fields["difference"] < 0.02
        await down(each)

    asyncio.run(main())
