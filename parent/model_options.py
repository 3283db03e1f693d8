"""What a person may say about one model: `[models."org/name"]` in `mlxd.toml`, and its profiles. Pure.

A profile is a set of defaults under a name of its own: `org/name:creative` asks the model's one worker with the
sampling of `creative`. What is left out is the flat setting's, or the model's own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from parent.values import Field, as_path, bad, checked, fields_of, near
from shared.providers import PROVIDERS

_BYTES = {"unit": "bytes", "needs": "model reload"}
_RELOAD = {"needs": "model reload"}
_Names = list[Annotated[str, Meta(min_length=1)]]


class Profile(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults of the requests that name it; a request's own fields win."""

    temperature: Annotated[float, Meta(ge=0, le=5, description="0 = the likeliest token always")] | None = (
        None
    )
    top_p: Annotated[float, Meta(gt=0, le=1, description="share of the likeliest tokens")] | None = None
    top_k: Annotated[int, Meta(ge=0, description="number of the likeliest tokens; 0 = off")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1, description="least share of the likeliest; 0 = off")] | None = (
        None
    )
    repetition_penalty: (
        Annotated[float, Meta(ge=0.001, le=1000, description="divides logits of recent tokens; 1 = off")]
        | None
    ) = None
    presence_penalty: (
        Annotated[float, Meta(ge=-100, le=100, description="taken off recent tokens; 0 = off")] | None
    ) = None
    frequency_penalty: (
        Annotated[float, Meta(ge=-100, le=100, description="the same, each time they occur; 0 = off")] | None
    ) = None
    max_tokens: Annotated[int, Meta(ge=1, description="tokens of one answer")] | None = None
    max_context: Annotated[int, Meta(ge=1, description="tokens of prompt and answer")] | None = None
    thinking: Annotated[bool, Meta(description="the template's enable_thinking")] | None = None
    template_kwargs: Annotated[dict[str, Any], Meta(description="handed to the chat template")] = {}
    adapter: Annotated[str, Meta(description="adapters to run with, A or A+B; none = none")] = ""

    @property
    def kwargs(self) -> dict[str, Any]:
        """For the chat template: `template_kwargs`, with `thinking` under the name that templates know."""
        known = {} if self.thinking is None else {"enable_thinking": self.thinking}
        return {**known, **self.template_kwargs}


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The table of one model. None = not said; sizes in bytes, `keep_alive` in seconds."""

    aliases: Annotated[_Names, Meta(description="further names of the model")] = []
    pin: Annotated[bool, Meta(description="loaded at start, never evicted")] = False
    keep_alive: (
        Annotated[
            float,
            Meta(
                ge=0,
                description="idle time before it is unloaded; 0 = never",
                extra={"unit": "seconds", "zero_is_never": True},
            ),
        ]
        | None
    ) = None
    max_context: Annotated[int, Meta(ge=0, description="as the setting", extra=_RELOAD)] | None = None
    max_rows: Annotated[int, Meta(ge=1, le=1024, description="as the setting", extra=_RELOAD)] | None = None
    prefill_chunk: Annotated[int, Meta(ge=0, description="as the setting", extra=_RELOAD)] | None = None
    prefix_cache_bytes: Annotated[int, Meta(ge=0, description="as the setting", extra=_BYTES)] | None = None
    kv_bytes: Annotated[int, Meta(ge=0, description="as the setting", extra=_BYTES)] | None = None
    kv_cache: (
        Annotated[
            str,
            Meta(
                description="as the setting",
                extra={"choices": ["auto", "full", "kv8", "kv4", "config"], "needs": "model reload"},
            ),
        ]
        | None
    ) = None
    kv_start: Annotated[int, Meta(ge=0, description="as the setting", extra=_RELOAD)] | None = None
    check_prefix: Annotated[bool, Meta(description="as the setting", extra=_RELOAD)] | None = None
    dtype: (
        Annotated[
            str,
            Meta(
                description="as the setting",
                extra={"choices": ["auto", "float32", "float16", "bfloat16"], "needs": "model reload"},
            ),
        ]
        | None
    ) = None
    provider: (
        Annotated[
            str,
            Meta(description="as the setting", extra={"choices": list(PROVIDERS), "needs": "model reload"}),
        ]
        | None
    ) = None
    messages: Annotated[
        str,
        Meta(
            description="what its chat template refuses is repaired and tried again, or not",
            extra={"choices": ["auto", "as_sent"], "needs": "model reload"},
        ),
    ] = "auto"
    adapter: Annotated[str, Meta(description="adapters of requests that name none, A or A+B")] = ""
    python: Annotated[
        str, Meta(description="Python interpreter of its worker; empty = the server's", extra=_RELOAD)
    ] = ""
    profiles: Annotated[
        dict[str, Profile], Meta(description="sets of defaults, asked for as NAME:PROFILE")
    ] = {}


OVER_SETTINGS = (
    "max_context",
    "max_rows",
    "prefill_chunk",
    "prefix_cache_bytes",
    "kv_bytes",
    "kv_cache",
    "kv_start",
    "check_prefix",
    "dtype",
    "provider",
)
"""Options that stand over the flat setting of the same name."""


def models_from(table: Any, origin: str) -> dict[str, ModelOptions]:
    """The `models` table of a settings file, checked; model ids as written.

    Raises `Refused` (invalid_request, `param` = `models.ID.KEY`) naming the file, the key and what to do.
    """
    if not isinstance(table, Mapping):
        raise bad("models", origin, 'expected tables; write [models."org/name"]')
    found = {}
    for model_id, options in table.items():
        if not model_id.strip():
            raise bad("models", origin, 'a model\'s name is empty; write [models."org/name"]')
        found[model_id] = _options(options, f"models.{model_id}", origin)
    _refuse_clashes(found, origin)
    return found


def _options(table: Any, where: str, origin: str) -> ModelOptions:
    values = _checked_table(ModelOptions, table, where, origin)
    profiles = table.get("profiles", {})
    if not isinstance(profiles, Mapping):
        raise bad(f"{where}.profiles", origin, "expected tables of profiles")
    made = {}
    for name, profile in profiles.items():
        _check_name(name, f"{where}.profiles", origin)
        inner = f"{where}.profiles.{name}"
        made[name] = Profile(**_checked_table(Profile, profile, inner, origin))
    for alias in values.get("aliases", []):
        _check_name(alias, f"{where}.aliases", origin)
    return ModelOptions(**{**values, "profiles": made})


def _checked_table(struct: type[msgspec.Struct], table: Any, where: str, origin: str) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise bad(where, origin, f"expected a table, not {table!r}")
    known = fields_of(struct)
    values = {}
    for key, value in table.items():
        if key not in known:
            hint = near(key, known, f"there is {', '.join(known)}")
            raise bad(f"{where}.{key}", origin, f"there is no such key{hint}")
        if key != "profiles":
            values[key] = _value(known[key], value, origin, f"{where}.{key}")
    return values


def _value(known: Field, value: Any, origin: str, name: str) -> Any:
    if known.name == "python" and isinstance(value, str) and value:
        try:
            return str(as_path(Path, value))
        except ValueError as error:
            raise bad(name, origin, str(error)) from None
    return checked(known, value, origin, name)


def _check_name(name: str, where: str, origin: str) -> None:
    if not name.strip() or name != name.strip():
        raise bad(where, origin, f"{name!r} is no name; write one without spaces around it")
    if ":" in name:
        raise bad(
            where, origin, f"{name!r} holds a colon, which parts a model from its profile; leave it out"
        )


def _refuse_clashes(models: Mapping[str, ModelOptions], origin: str) -> None:
    owners = {model_id: model_id for model_id in models}
    for model_id, options in models.items():
        for alias in options.aliases:
            owner = owners.setdefault(alias, model_id)
            if owner != model_id:
                problem = f"{alias!r} is a name of {owner} too; give one of them another"
                raise bad(f"models.{model_id}.aliases", origin, problem)
