"""The steps of a restart in place, with a server that only notes what is done to it."""

import asyncio
from collections.abc import Sequence

import pytest

from parent.restarter import Restarter
from shared.errors import ErrorCode, Refused


class Noting:
    """A server on which so many answers run; `suspend` may fail."""

    def __init__(self, running: int = 0, fault: Exception | None = None) -> None:
        self.did: list[str] = []
        self.running, self.fault = running, fault

    async def pause(self) -> None:
        self.did.append("pause")

    async def resume(self) -> None:
        self.did.append("resume")

    def num_open(self) -> int:
        return self.running

    def parked(self) -> list[int]:
        return [7]

    def cut(self) -> None:
        self.did.append("cut")

    async def suspend(self) -> None:
        self.did.append("suspend")
        if self.fault:
            raise self.fault

    def leave(self) -> None:
        self.did.append("leave")


def restarted(server: Noting, *, exec_fails: bool = False, settled: Sequence[str] = ("", "")) -> str:
    """Restart it to the end -> what the status says then. `settled`: what the settling says each time."""
    said = list(settled)

    def execute(clients) -> None:
        assert list(clients) == [7]
        server.did.append("exec")
        if exec_fails:
            raise OSError("no such program")

    async def ready() -> str:
        return ""

    async def body() -> str:
        restarter = Restarter(
            "boot", drain_s=lambda: 0.0, execute=execute, preflight=ready, settle=lambda: said.pop(0)
        )
        restarter.serves(server)
        await restarter.request(now=False)
        assert restarter._task is not None
        await restarter._task
        return restarter.status().state

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("server", "exec_fails", "did", "state"),
    [
        (Noting(), False, ["pause", "suspend", "exec"], "draining"),
        (Noting(running=1), False, ["pause", "resume"], "given_up"),
        # half closed there is no way back: the new image begins afresh
        (Noting(fault=RuntimeError("the disk is full")), False, ["pause", "suspend", "exec"], "draining"),
        (Noting(), True, ["pause", "suspend", "exec", "leave"], "draining"),
    ],
)
def test_what_is_done_and_what_is_told(server: Noting, exec_fails: bool, did: list[str], state: str) -> None:
    assert restarted(server, exec_fails=exec_fails) == state
    assert server.did == did


def test_workers_that_could_not_be_taken_over_are_not_given_up() -> None:
    server = Noting()
    with pytest.raises(Refused, match=r"^not restarted: the disk is full$") as caught:
        restarted(server, settled=["the disk is full"])
    assert caught.value.failure.code is ErrorCode.CONFLICT
    assert server.did == []
    assert restarted(server, settled=["", "the disk is full"]) == "given_up"  # it filled meanwhile
    assert server.did == ["pause", "resume"]
