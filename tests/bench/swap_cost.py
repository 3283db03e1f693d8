"""What a swap costs: beside the bare worker's stop and cold start, and in the parent where both models have room."""

import asyncio
import statistics
import time
import uuid
from pathlib import Path

from parent.config import load_settings
from parent.workers.blas import worker_env
from parent.workers.launcher import default_command, worker_environment
from parent.workers.states import Limits, State
from parent.workers.supervisor import Supervisor
from shared import wire
from shared.control import LaunchModel
from tests.bench.pooled import FAKE, GB, Client, ask, two_real
from tests.bench.serve import ROOT
from tests.bench.verdict import How, Line, below
from tests.process.harness import Served, chat, served
from tests.process.supervised import reach

BAR = 1.3
SWITCH_BAR_MS = 1.0


def measure_swap(model: Path, folder: Path, how: How) -> list[Line]:
    """Both halves."""
    (folder / "real").mkdir()
    (folder / "fake").mkdir()
    return [
        *_with_room_for_one(model, folder / "real", 2 if how.quick else 5),
        _with_room_for_two(folder / "fake", 5 if how.quick else 20),
    ]


def _with_room_for_one(model: Path, folder: Path, rounds: int) -> list[Line]:
    """Swaps and bare starts in turn. The first of each is not counted: it warms the file cache."""
    swaps: list[float] = []
    stops: list[float] = []
    colds: list[float] = []
    settings = load_settings({"data_dir": str(folder / "data")}, {}, home=folder).settings
    with two_real(model, folder) as server:
        environment = worker_environment({**worker_env(settings)[0], "PYTHONPATH": str(ROOT)})
        for number in range(rounds + 1):
            ask(server.url, _question("one"))
            there, back = _swap(server, "two"), _swap(server, "one")
            launch = _launch(server, folder)
            server.http.post("/v1/models/one/unload", json={"wait": True}).raise_for_status()
            cold, stop = asyncio.run(_bare(launch, environment, folder))
            if number:
                swaps += [there, back]
                stops.append(stop)
                colds.append(cold)
    swap, stop, cold = map(statistics.median, (swaps, stops, colds))
    return [
        Line("swap", "request to first token, another model resident and idle", f"{swap:.2f} s"),
        Line("swap", "bare worker, start to first token", f"{cold:.2f} s"),
        Line("swap", "bare worker, stop", f"{stop:.2f} s"),
        below("swap", "swap / (stop + cold start)", swap / (stop + cold), BAR, notes=f"{len(swaps)} swaps"),
    ]


def _question(model: str) -> dict[str, object]:
    """Never the same twice: no kept prompt may help."""
    text = f"{uuid.uuid4().hex[:6]}: what is the capital of France?"
    return chat(text, model=model, temperature=0, max_tokens=2)


def _swap(server: Served, model: str) -> float:
    """To a model while the other is idle for longer than it has to be before it gives way."""
    values = server.http.get("/admin/config").json()["values"]
    time.sleep(values["linger_s"] + values["min_residency_s"] + 0.1)
    loaded = [row["model"] for row in server.running().values() if row["phase"] == "ready"]
    assert len(loaded) == 1, f"not one model resident but {loaded}"
    assert loaded != [model], f"{model} is resident before the swap to it"
    took = ask(server.url, _question(model)).first_s
    assert list(server.running()) == [model]
    return took


def _launch(server: Served, folder: Path) -> LaunchModel:
    """What the pool has told its worker, but for the disk: nothing is kept there, so a bare stop writes nothing."""
    [row] = server.running().values()
    [account] = server.ledger()["accounts"].values()
    return LaunchModel(
        model_id=row["model"],
        path=str(folder / "data" / "models" / row["model"]),
        kv_bytes=account["grant"]["kv"],
        prefix_cache_bytes=account["grant"]["prefix"],
    )


async def _bare(launch: LaunchModel, environment: dict[str, str], folder: Path) -> tuple[float, float]:
    """(start to first token, stop) of the same worker without a pool, alone on the machine as the pool's is."""
    worker = Supervisor(
        launch,
        command=default_command(),
        environment=environment,
        runtime_dir=folder,
        limits=Limits(),
        name="bare",
    )
    began = time.perf_counter()
    worker.want()
    try:
        await reach(worker, State.READY)
        await _first_token(worker)
        cold = time.perf_counter() - began
        await asyncio.sleep(1.0)  # idle, as the pool's is
        began = time.perf_counter()
    finally:
        worker.stop()
        await worker.absent()
    return cold, time.perf_counter() - began


async def _first_token(worker: Supervisor) -> None:
    messages = [{"role": "user", "content": f"{uuid.uuid4().hex[:6]}: what is the capital of France?"}]
    request = wire.GenerateRequest(
        request_id=uuid.uuid4().hex,
        prompt=wire.ChatPrompt(messages),
        seed=7,
        sampling=wire.Sampling(temperature=0),
        max_tokens=2,
    )
    assert worker.client is not None
    async with await worker.client.generate(request) as stream:
        async for events in stream:
            if any(isinstance(event, wire.Text) for event in events):
                return


def _with_room_for_two(folder: Path, rounds: int, each: int = 50) -> Line:
    """Time to the first event, fake workers that answer at once: always one model, and one after the other."""
    script = {"measured_bytes": 6 * GB, "tokens": 1}
    same: list[float] = []
    alternating: list[float] = []
    with served(folder, script, {"b": script}, memory_budget_bytes="13GB") as server:
        client = Client(server.url)
        for model in (FAKE, "b"):
            client.ask(chat("x", model=model))
        for _ in range(rounds):
            same += [client.ask(chat("x", model=FAKE)).first_s for _ in range(each)]
            alternating += [
                client.ask(chat("x", model=model)).first_s for _ in range(each // 2) for model in (FAKE, "b")
            ]
        assert len(server.running()) == 2
        assert len(server.journal("spawned")) == len(server.journal("spawned", "b")) == 1
        client.close()
    one, both = (statistics.median(times) * 1e3 for times in (same, alternating))
    return below(
        "swap",
        "room for two: a switch costs",
        both - one,
        SWITCH_BAR_MS,
        " ms",
        notes=f"{both:.2f} - {one:.2f}, medians of {len(same)}",
    )
