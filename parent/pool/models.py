"""How a client's name finds one of the models that are served. Pure."""

import difflib
from collections.abc import Sequence

from parent.library.catalog import ModelEntry
from shared.errors import ErrorCode, Refused, refuse


def resolve(models: Sequence[ModelEntry], name: str) -> ModelEntry:
    """The model of this name; "" is the first. Raises `Refused` (model_not_found) with near matches."""
    if not name:
        return models[0]
    for model in models:
        if name == model.id or name in model.aliases:
            return model
    raise not_found(models, name)


def not_found(models: Sequence[ModelEntry], name: str) -> Refused:
    """What to raise for an unknown name: it says what is served."""
    known = {each.lower(): each for model in models for each in (model.id, *model.aliases)}
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    guess = f"; did you mean {' or '.join(known[each] for each in near)}?" if near else "."
    served = ", ".join(" = ".join([model.id, *model.aliases]) for model in models)
    return refuse(
        ErrorCode.MODEL_NOT_FOUND, f"there is no model {name!r} here{guess} Served: {served}", param="model"
    )
