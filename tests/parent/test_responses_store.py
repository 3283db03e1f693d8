"""Stored responses as the API uses them: against a plain model, through deletes, expiry and restarts."""

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from parent.db import Database
from parent.inference.history import History
from parent.protocols.base import Answer, Meta
from parent.protocols.responses import decode as responses
from parent.protocols.responses import stored as responses_stored
from parent.protocols.responses.object import Response, whole
from parent.protocols.responses.stream import ResponseStream
from shared import wire
from shared.errors import ErrorCode, Failure, Refused
from tests.parent.test_history import TTL_S, World


def meta_of(number: int, text: str, previous: str | None, *, background: bool) -> Meta:
    body = {"input": text, "previous_response_id": previous, "background": background}
    return Meta(f"{number:032x}", 1, "m", responses.decode(json.dumps(body).encode()))


def answered(meta: Meta, text: str, reason: wire.FinishReason) -> Response:
    answer = Answer()
    answer.add([wire.Text(text, [1]), wire.Finish(reason, wire.Usage(1, 1))])
    return whole(meta, answer)


class StoredResponsesAreTheModel(RuleBasedStateMachine):
    """Each response by its number; the model knows what was said, and what became of it."""

    made = Bundle("made")

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.runner = asyncio.Runner()
        self.world = World()
        self.world.most = 1 << 20
        self.model: dict[str, dict[str, Any]] = {}
        self.running: dict[str, Meta] = {}
        self.count = 0
        self.open()

    def open(self) -> None:
        self.db = Database(Path(self.folder.name)).open()
        self.history = History(self.db, self.world.limits, self.world.clock)

    def teardown(self) -> None:
        self.runner.run(self.db.close())
        self.runner.close()
        self.folder.cleanup()

    def run(self, work: Any) -> Any:
        try:
            return self.runner.run(work)
        except Refused as refused:
            return refused.failure

    def there(self, id: str) -> bool:
        return id in self.model and self.model[id]["expires"] > self.world.now

    def expected(self, id: str | None) -> list[tuple[str, str]] | ErrorCode:
        """Who said what in the chain that ends in `id`."""
        chain: list[dict[str, Any]] = []
        while id is not None:
            if not self.there(id):
                return ErrorCode.NOT_FOUND
            chain.insert(0, self.model[id])
            id = self.model[id]["previous"]
        said: list[tuple[str, str]] = []
        for link in chain:
            if link["id"] in self.running:
                return ErrorCode.CONFLICT
            if link["status"] in ("queued", "failed", "cancelled"):
                return ErrorCode.INVALID_REQUEST
            said += [("user", link["asked"]), ("assistant", link["said"])]
        return said

    def conversation(self, id: str) -> Any:
        async def look() -> list[tuple[str, str]]:
            items = responses_stored.conversation(await self.history.expand(id), self.running)
            return [(item["role"], item["content"][0]["text"]) for item in items]

        found = self.run(look())
        return found.code if isinstance(found, Failure) else found

    def store(self, meta: Meta, response: Response, previous: str | None, asked: str, said: str) -> str:
        delta = responses_stored.encode(meta.asked.items, response)  # type: ignore[attr-defined]
        put = self.history.replace if response.id in self.model else self.history.remember
        assert self.run(put(response.id, previous, delta, "m")) is True
        self.model[response.id] = {
            "id": response.id, "previous": previous, "asked": asked, "said": said, "status": response.status,
            "expires": self.world.now + TTL_S,
        }  # fmt: skip
        return response.id

    @rule(target=made, previous=st.none() | made, reason=st.sampled_from(["stop", "length"]))
    def create(self, previous: str | None, reason: wire.FinishReason) -> str:
        if isinstance(self.expected(previous), ErrorCode):
            previous = None
        self.count += 1
        meta = meta_of(self.count, f"q{self.count}", previous, background=False)
        said = f"a{self.count}"
        return self.store(meta, answered(meta, said, reason), previous, f"q{self.count}", said)

    @rule(target=made)
    def begin_in_the_background(self) -> str:
        self.count += 1
        meta = meta_of(self.count, f"q{self.count}", None, background=True)
        encoder = ResponseStream(meta)
        encoder.queue()
        id = self.store(meta, encoder.snapshot, None, f"q{self.count}", "")
        self.running[id] = meta
        return id

    @rule(id=made, end=st.sampled_from(["stop", "failed", "cancelled"]))
    def end_in_the_background(self, id: str, end: Any) -> None:
        meta = self.running.pop(id, None)
        if meta is None:
            return
        number = int(meta.id, 16)
        if end == "stop":
            response = answered(meta, f"a{number}", "stop")
        else:
            response = ResponseStream(meta).stopped(end, Failure(ErrorCode.ENGINE_FAULT, "why"))
        self.store(meta, response, None, f"q{number}", f"a{number}")

    @rule(id=made)
    def follow(self, id: str) -> None:
        assert self.conversation(id) == self.expected(id)

    @rule(id=made)
    def fetch(self, id: str) -> None:
        found = self.run(self.history.get(id))
        if not self.there(id):
            assert found.code is ErrorCode.NOT_FOUND
            return
        response = json.loads(responses_stored.response_of(found.delta))
        status = self.model[id]["status"]
        assert response["id"] == id
        assert response["status"] == ("failed" if status == "queued" else status)
        if status == "queued":
            assert response["error"]["message"] == responses_stored.LOST

    @rule(id=made)
    def delete(self, id: str) -> None:
        found = self.run(self.history.forget(id))
        assert (found is None) or found.code is ErrorCode.NOT_FOUND
        if id in self.running:
            del self.running[id]  # it is cancelled before
        self.model.pop(id, None)

    @rule(by=st.floats(1, 60))
    def time_passes(self, by: float) -> None:
        self.world.now += by

    @rule()
    def restart(self) -> None:
        self.runner.run(self.db.close())
        self.running.clear()
        self.open()


def test_responses_store_does_what_a_dict_would() -> None:
    run_state_machine_as_test(
        StoredResponsesAreTheModel,
        settings=settings(max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck)),
    )
