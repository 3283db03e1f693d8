"""Show the models that the running server has in memory, and the memory that is left.

mlxd ps
"""

import argparse
from typing import Any

from parent.commands import options
from parent.commands.running import call, require_running
from parent.commands.terminal import print_table
from shared.units import format_bytes


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    running = require_running(options.settings_of(args).data_dir)
    rows = call(running, "GET", "/running")["models"]
    ledger = call(running, "GET", "/admin/ledger")
    if rows:
        print_table(["MODEL", "STATE", "MEMORY", "RUNNING", "WAITING", "LEAVES"], [_row(row) for row in rows])
    else:
        print("no model is in memory")
    budget, free = ledger["budget_bytes"], max(0, ledger["free_bytes"])
    print(f"{format_bytes(free)} of {format_bytes(budget)} free")
    if ledger["leaked_bytes"]:
        print(f"{format_bytes(ledger['leaked_bytes'])} did not come back from ended workers")
    return 0


def _row(row: dict[str, Any]) -> list[str]:
    expires = row["expires_in_s"]
    leaves = (
        "never: pinned"
        if row["pinned"]
        else "when room is needed"
        if expires is None
        else f"in {expires:.0f} s"
    )
    return [
        row["model"],
        row["state"],
        format_bytes(row["held_bytes"]),
        str(row["running"]),
        str(row["waiting"]),
        leaves,
    ]
