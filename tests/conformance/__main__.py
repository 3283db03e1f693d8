"""Ask a running server for every feature, by every official SDK, and print the matrix; 1 when a cell fails.

    python -m tests.conformance [--url http://127.0.0.1:8080] [--model ID] [--only WORD] [--node]

A cell is "yes", "no" with its reason below, "–" where the protocol has no such thing, or "·" where the model at hand
has not. `--only` takes the features and protocols whose names hold the word. `--node` asks a part of it by
OpenAI's package for Node as well.
"""

import argparse
import sys
import traceback

import httpx2
import openai

from tests.conformance import node_part
from tests.conformance.asking import Server
from tests.conformance.dialects import DIALECTS
from tests.conformance.features import NotHere
from tests.conformance.table import begun, cells, markdown


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", default="", help="default: the first of /v1/models")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--node", action="store_true", help="OpenAI's package for Node too")
    options = parser.parse_args()
    try:
        server = Server(options.url, options.model)
    except (openai.OpenAIError, httpx2.HTTPError, StopIteration) as error:
        print(f"nobody to ask at {options.url}: {error or 'no model is there'}", file=sys.stderr)
        return 2
    found, reasons = ask(server, options.only)
    server.close()
    print(markdown(lambda feature, column: found.get((feature, column), "")))
    if options.node:
        told = node_part.ask(options.url, server.model)
        print("\n" + node_part.markdown(told))
        reasons += [f"Node, {name}: {said}" for name, said in told.items() if said]
    for reason in reasons:
        print(f"\nno: {reason}")
    return 1 if reasons else 0


def ask(server: Server, only: str) -> tuple[dict[tuple[str, str], str], list[str]]:
    """What each cell says, and why those that fail do."""
    found, reasons = {}, []
    chosen = [
        (feature, column)
        for feature, column in cells()
        if only.lower() in f"{feature} {column} {DIALECTS[column].title}".lower()
    ]
    for (feature, column), asked in begun(server, chosen).items():
        try:
            asked.result()
            found[feature, column] = "yes"
        except NotHere:
            found[feature, column] = "·"
        except Exception as error:  # whatever it is, it is what the cell says
            found[feature, column] = "no"
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error) or where.line  # a bare assert says nothing but its line
            reasons.append(f"{feature}, {DIALECTS[column].title}: {type(error).__name__}: {said}")
        print(f"{feature}, {DIALECTS[column].title}: {found[feature, column]}", file=sys.stderr, flush=True)
    return found, reasons


if __name__ == "__main__":
    sys.exit(main())
