"""One stream: the engine beside the bare loop over the same graph, and over HTTP beside mlx_lm.server."""

import contextlib
import statistics
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.bench.asking import Row, ask_http
from tests.bench.engine_lab import lab
from tests.bench.engine_rigs import Rig, without_one_row
from tests.bench.serve import STORY, mlx_lm, mlxd
from tests.bench.verdict import How, Line, at_least

OF_BARE = 0.97
OF_PEER = 1.5


def measure_single(rig: Rig, folder: Path, how: How) -> list[Line]:
    """Both halves, one after the other: servers that are only there take memory, and wake up now and then."""
    rounds = 2 if how.quick else 5
    return _beside_bare(rig, rounds, how) + _beside_peer(rig, folder, rounds)


def _beside_bare(rig: Rig, rounds: int, how: How) -> list[Line]:
    lines = []
    with lab(rig.model, rig.environment) as ask:
        for name in ("bare", "engine_alone"):
            ask(name, tokens=4, prompt=32)
        rows = _by_turns(
            {name: lambda name=name: ask(name, tokens=48, prompt=32) for name in ("bare", "engine_alone")},
            rounds,
        )
        share, notes = _shares(rows, lambda row: row["decode_tps"], "tok/s")
        lines.append(at_least("single", "decode: engine / bare loop", share, OF_BARE, notes=notes))
        for prompt in (1000, 2000 if how.quick else 4000):
            rows = _by_turns(
                {
                    name: lambda name=name, prompt=prompt: ask(name, tokens=2, prompt=prompt)
                    for name in ("bare", "engine_alone")
                },
                1 if how.quick else rounds,
            )
            share, notes = _shares(rows, lambda row, prompt=prompt: prompt / row["ttft_s"], "tok/s")
            what = f"prefill of {prompt} tokens: engine / bare loop"
            lines.append(at_least("single", what, share, OF_BARE, notes=notes))
    return lines


def _beside_peer(rig: Rig, folder: Path, rounds: int) -> list[Line]:
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(mlxd(rig.model, folder / "data"))
        alike = stack.enter_context(mlx_lm(rig.model, rig.peer, rig.environment))
        plain = stack.enter_context(mlx_lm(rig.model, rig.peer, without_one_row(rig.environment)))
        ways = {
            name: lambda server=server: ask_http(
                server.port, server.model, f"{uuid.uuid4().hex[:6]}. {STORY}", 48
            )
            for name, server in (("plain", plain), ("alike", alike), ("ours", ours))
        }
        for ask in ways.values():
            ask()
        rows = _by_turns(ways, rounds)
    share, notes = _shares(
        {name: rows[name] for name in ("plain", "ours")}, lambda row: row["decode_tps"], "tok/s"
    )
    lent, both = _shares(
        {name: rows[name] for name in ("alike", "ours")}, lambda row: row["decode_tps"], "tok/s"
    )
    return [
        at_least("single", "decode: mlxd / mlx_lm.server on the same BLAS", share, OF_PEER, notes=notes),
        Line("single", "the same, our library for few rows lent to it", f"{lent:.3g} ({both})"),
    ]


def _by_turns(ways: dict[str, Callable[[], Row]], rounds: int) -> dict[str, list[Row]]:
    """Round by round, so that a busy moment of the machine hits all of them."""
    rows: dict[str, list[Row]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, ask in ways.items():
            rows[name].append(ask())
    return rows


def _shares(rows: dict[str, list[Row]], value: Callable[[Row], float], unit: str) -> tuple[float, str]:
    """Of two ways: the median of the second over that of the first, and both in words."""
    first, second = (statistics.median(map(value, found)) for found in rows.values())
    return second / first, f"{second:.4g} / {first:.4g} {unit}"
