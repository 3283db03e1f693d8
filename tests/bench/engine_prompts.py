"""Long prompts: beside rows that decode (fairness), and begun like one that is kept (prefix)."""

import statistics
import uuid
from pathlib import Path

from tests.bench.engine_lab import lab
from tests.bench.engine_rigs import Rig
from tests.bench.pooled import QUIET, ask
from tests.bench.verdict import How, Line, at_least, below
from tests.e2e.real import serving
from tests.process.harness import Served, chat

ROWS = 4
FAIR = 0.5
WARM, DISK = 0.15, 0.3
SENTENCE = "The keeper counted the waves and wrote each one down. "
SENTENCES = 182  # 11 tokens each


def measure_fairness(rig: Rig, folder: Path, how: How) -> list[Line]:
    """Four rows decode, and a prompt of 4,000 tokens comes."""
    prompt, rounds = (2000, 1) if how.quick else (4000, 5)
    shares, prefills, solos = [], [], []
    with lab(rig.model, rig.environment) as asked:
        asked("engine_alone", tokens=4, prompt=32)
        for _ in range(rounds):
            row = asked("mixed", rows=ROWS, prompt=prompt)
            shares.append(row["during_tps"] / row["alone_tps"])
            prefills.append(row["prefill_s"])
            solos.append(asked("engine_alone", tokens=2, prompt=prompt)["ttft_s"])
    prefill, solo = statistics.median(prefills), statistics.median(solos)
    what = f"{ROWS} rows' decode during a prefill of {prompt} tokens / undisturbed"
    return [
        at_least("fairness", what, statistics.median(shares), FAIR),
        Line(
            "fairness",
            "that prefill beside them; alone",
            f"{prefill:.3g} s; {solo:.3g} s = {prefill / solo:.3g}",
        ),
    ]


def measure_prefix(rig: Rig, folder: Path, how: How) -> list[Line]:
    """Time to the first text over HTTP: cold, begun like the one before, and the same after the worker has left,
    another one has come and answered something short.
    """
    cold, warm, disk = [], [], []
    with serving(rig.model, folder, *QUIET) as server:
        _ask(server, "Say hello.")
        for number in range(1 if how.quick else 5):
            prefix = f"{uuid.uuid4().hex[:6]}. " + SENTENCE * SENTENCES
            cold.append(_ask(server, prefix + "What did the keeper count?"))
            warm.append(_ask(server, prefix + "What was written down?"))
            server.http.post(f"/v1/models/{rig.model.name}/unload", json={"wait": True}).raise_for_status()
            _ask(server, f"Say hello, {number}.")
            disk.append(_ask(server, prefix + "Who wrote it down?"))
    base, kept, spilled = map(statistics.median, (cold, warm, disk))
    return [
        below(
            "prefix",
            "first token, 2,000 tokens kept / cold",
            kept / base,
            WARM,
            notes=f"{kept:.3g} / {base:.3g} s",
        ),
        below(
            "prefix",
            "the same from disk in a new worker / cold",
            spilled / base,
            DISK,
            notes=f"{spilled:.3g} / {base:.3g} s",
        ),
    ]


def _ask(server: Served, text: str) -> float:
    body = chat(text, model=server.model_dir.name, temperature=0, max_tokens=2)
    return ask(server.url, body).first_s
