"""What the public formats cost beside the model: `python -m tests.bench.protocols MODEL_DIR [--step-us N]`.

For each protocol: reading a request, its template and tokens, and the encoding of each event, on one core, per token
of an answer of `--tokens`, as a share of what a token takes in the engine (`--step-us`). The bar is 2 %.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from parent.protocols.anthropic import request as anthropic
from parent.protocols.base import PLAIN, Meta, Protocol
from parent.protocols.openai import chat as openai_chat
from parent.protocols.openai import completions as openai_completions
from parent.protocols.responses import decode as responses
from shared import wire
from worker.text.template import load_template
from worker.text.tokenizer import load_tokenizer

BAR = 0.02
STORY = "Write a long story about a lighthouse keeper, a storm and a lost ship."
TURNS = [
    {"role": "user", "content": STORY},
    {"role": "assistant", "content": "The keeper counted the waves and wrote each one down. " * 8},
    {"role": "user", "content": "Go on."},
]
BODIES: dict[str, tuple[Protocol, dict[str, Any]]] = {
    "chat": (openai_chat.PROTOCOL, {"messages": TURNS}),
    "completions": (openai_completions.PROTOCOL, {"prompt": STORY}),
    "responses": (responses.PROTOCOL, {"input": TURNS}),
    "anthropic": (anthropic.PROTOCOL, {"messages": TURNS, "max_tokens": 512}),
}


def measure(model: Path, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    """Microseconds per token of an answer, by protocol: `parse`, `template`, `encode`, and their `sum`."""
    tokenizer = load_tokenizer(model)
    template = load_template(model, tokenizer.config, tokenizer.special)

    def prompt_of(name: str) -> None:
        text = STORY if name == "completions" else template.render(TURNS)
        tokenizer.encode_rendered(text)

    found = {}
    for name, (protocol, fields) in BODIES.items():
        body = json.dumps({"model": "m", "stream": True, **fields}).encode()
        row = {
            "parse": _per_call_us(partial(protocol.decode, body, PLAIN), rounds * 20) / tokens,
            "template": _per_call_us(partial(prompt_of, name), rounds * 20) / tokens,
            "encode": _per_call_us(partial(_stream, protocol, body, tokens), rounds) / tokens,
        }
        found[name] = row | {"sum": sum(row.values())}
    return found


def _stream(protocol: Protocol, body: bytes, tokens: int) -> None:
    """One streamed answer, an event a token."""
    meta = Meta(id="r", created=1, model="m", asked=protocol.decode(body, PLAIN))
    stream = protocol.stream(meta)
    stream.feed([wire.Started(prompt_tokens=100, context_left=1000)])
    for number in range(tokens):
        stream.feed([wire.Text(" word", [number])])
    stream.finish(wire.Finish("length", wire.Usage(100, tokens)))


def _per_call_us(call: Callable[[], object], count: int) -> float:
    """The best of three, since what is slower is the machine's business."""
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(count):
            call()
        best = min(best, time.perf_counter() - began)
    return best / count * 1e6


def print_rows(rows: dict[str, dict[str, float]], step_us: float) -> None:
    print(f"\nformats, us per token of an answer; a decode step takes {step_us:.0f} us; bar {BAR:.0%}")
    for name, row in rows.items():
        parts = ", ".join(f"{part} {row[part]:.1f}" for part in ("parse", "template", "encode"))
        share = row["sum"] / step_us
        print(
            f"{name:12} {row['sum']:6.1f}  ({parts})  {share:7.2%}{'' if share <= BAR else '  over the bar'}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--step-us", type=float, default=0.0, help="of one token; 0 = print no share")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    rows = measure(options.model, options.tokens, options.rounds)
    if options.step_us:
        print_rows(rows, options.step_us)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
