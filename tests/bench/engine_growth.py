"""What a decode step costs over rows and context, beside the arithmetic, with a plot; and the memory that rows take.

The arithmetic: a step reads every weight once, or, where more rows make it the longer of the two, does two operations
per weight and row; and it reads the keys and values of every row once. Bytes and operations a second are what one large
product reaches on the same machine in the same process.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.bench.engine_lab import Ask, lab
from tests.bench.engine_rigs import Rig
from tests.bench.verdict import How, Line, below

ROWS = (1, 2, 4, 8, 16)
CONTEXTS = (128, 512, 1024, 2048, 4096)
MEMORY = 1.15

Cell = tuple[int, int]
"""Rows and context."""


class Limits(NamedTuple):
    """See `engine_lab.Lab.limits`."""

    bytes_per_s: float
    flops: float
    weights_bytes: int
    kv_bytes_per_token: int

    def step_s(self, rows: int, context: int) -> float:
        """The least that a step of float32 weights can take."""
        weights = max(self.weights_bytes / self.bytes_per_s, 2 * rows * (self.weights_bytes / 4) / self.flops)
        return weights + rows * context * self.kv_bytes_per_token / self.bytes_per_s


def measure_growth(rig: Rig, folder: Path, how: How) -> list[Line]:
    """One line per number of rows; the plot's file is told last."""
    rows, contexts = ((1, 4, 16), (128, 1024)) if how.quick else (ROWS, CONTEXTS)
    with lab(rig.model, rig.environment) as ask:
        ask("engine_alone", tokens=4, prompt=32)
        limits = Limits(**ask("limits"))
        cells = _cells(ask, rows, contexts, 1 if how.quick else 5)
        grown = _grown(ask, 1 if how.quick else 5)
    lines = [
        Line(
            "growth",
            "this machine: one-row product; large product",
            f"{limits.bytes_per_s / 1e9:.1f} GB/s; {limits.flops / 1e9:.0f} Gflop/s",
        )
    ]
    for count in rows:
        told = "; ".join(
            f"{context}: {cells[count, context] * 1e3:.0f} ({limits.step_s(count, context) * 1e3:.0f})"
            for context in contexts
        )
        lines.append(Line("growth", f"step of {count} rows in ms by context (by arithmetic)", told))
    for count in rows:
        per_token, by_arithmetic = _slope(cells, limits, count, contexts)
        told = f"{per_token * 1e6:.1f} us; {by_arithmetic * 1e6:.1f} us"
        lines.append(Line("growth", f"per token of context and row, {count} rows; by arithmetic", told))
    lines.append(
        Line("growth", "the step in which the buffers of 1,024 tokens grow / others", f"{grown:.2f}")
    )
    if rig.plot is not None:
        plot(cells, limits, rows, contexts, rig.plot)
        lines.append(Line("growth", "plotted", str(rig.plot)))
    return lines


def _cells(ask: Ask, rows: tuple[int, ...], contexts: tuple[int, ...], rounds: int) -> dict[Cell, float]:
    found: dict[Cell, list[float]] = {}
    for _ in range(rounds):
        for context in contexts:
            for count in rows:
                steps = ask("steps", rows=count, context=context, count=8)
                found.setdefault((count, context), []).append(statistics.median(steps))
    return {cell: statistics.median(values) for cell, values in found.items()}


def _grown(ask: Ask, rounds: int) -> float:
    """By what a step takes longer when every layer moves to a greater buffer, at 1,025 tokens; median."""
    found = []
    for _ in range(rounds):
        steps = ask("steps", rows=1, context=1024 - 16, count=32)
        found.append(max(steps[8:16]) / statistics.median(steps))
    return statistics.median(found)


def _slope(
    cells: Mapping[Cell, float], limits: Limits, rows: int, contexts: tuple[int, ...]
) -> tuple[float, float]:
    """Seconds that a token of context adds per row, measured and by arithmetic, between the ends of the range."""
    first, last = contexts[0], contexts[-1]
    span = (last - first) * rows
    return (
        (cells[rows, last] - cells[rows, first]) / span,
        (limits.step_s(rows, last) - limits.step_s(rows, first)) / span,
    )


def plot(
    cells: Mapping[Cell, float], limits: Limits, rows: tuple[int, ...], contexts: tuple[int, ...], file: Path
) -> None:
    """Milliseconds a step, over context for each number of rows, and over rows for each context."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"], mpl.rcParams["svg.hashsalt"] = "none", "mlxd"
    from matplotlib import pyplot

    figure, sides = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for side, lines, ticks, unit in (
        (sides[0], rows, contexts, "rows"),
        (sides[1], contexts, rows, "tokens"),
    ):
        for line in lines:
            keys = [(line, tick) if unit == "rows" else (tick, line) for tick in ticks]
            (drawn,) = side.plot(
                ticks, [cells[key] * 1e3 for key in keys], marker="o", label=f"{line} {unit}"
            )
            side.plot(ticks, [limits.step_s(*key) * 1e3 for key in keys], ":", color=drawn.get_color())
        side.set_ylabel("ms a decode step")
        side.set_ylim(bottom=0)
        side.set_xlabel("tokens of context" if unit == "rows" else "rows")
        side.legend(title="dotted: arithmetic")
    figure.savefig(file, metadata={"Date": None})


def measure_memory(rig: Rig, folder: Path, how: How) -> list[Line]:
    """Peaks of mlx's allocator: while the weights come in, and over the formula while rows run."""
    shapes = ((1, 1000, 16), (4, 250, 16)) if how.quick else ((1, 4000, 64), (4, 1000, 64), (16, 250, 64))
    with lab(rig.model, rig.environment) as ask:
        found = ask("load_peak")
        lines = [
            Line("memory", "peak while loading / weights", f"{found['peak'] / found['weights']:.3g}"),
        ]
        for rows, prompt, tokens in shapes:
            row = ask("peak", rows=rows, prompt=prompt, tokens=tokens)
            ratio = row["peak"] / (row["weights"] + row["kv"])
            notes = f"{row['peak'] / 1e6:.0f} / ({row['weights'] / 1e6:.0f} + {row['kv'] / 1e6:.0f}) MB"
            what = f"peak, {rows} rows of {prompt} + {tokens} tokens / (weights + KV)"
            lines.append(below("memory", what, ratio, MEMORY, notes=notes))
    return lines
