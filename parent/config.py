"""Settings: one Struct; each value comes from a flag, the environment, `mlxd.toml` or its default.

The Struct is the form, the validation and the documentation: a field's `Meta` carries its bounds, what it is
for, and (`extra`) the unit in which people write it. `load_settings` remembers where each value came from.
"""

import difflib
import math
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from shared.errors import ErrorCode, Refused, refuse
from shared.units import parse_bytes, parse_seconds

_BYTES = {"unit": "bytes"}
_SECONDS = {"unit": "seconds"}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of `mlxd serve`. Durations are seconds, sizes are bytes, 0 means the engine's choice."""

    data_dir: Annotated[Path, Meta(description="everything mlxd writes lives below it")]
    host: Annotated[str, Meta(min_length=1, description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port to listen on; 0 = any free one")] = 8080
    model: Annotated[
        str, Meta(description="name or directory of the model to serve; empty = the only one or the starter")
    ] = ""
    allowed_hosts: Annotated[
        list[str], Meta(description="further Host names to answer to; loopback names always are")
    ] = []

    dtype: Annotated[
        str,
        Meta(
            description="type of the activations; auto = float32 on mlx's CPU backend, else the checkpoint's",
            extra={"choices": ["auto", "float32", "float16", "bfloat16"]},
        ),
    ] = "auto"
    max_context: Annotated[int, Meta(ge=0, description="tokens of context to offer; 0 = the model's")] = 0
    prefill_chunk: Annotated[
        int, Meta(ge=0, description="prompt tokens in one prefill step; 0 = by device")
    ] = 0
    max_rows: Annotated[int, Meta(ge=1, le=1024, description="requests answered side by side")] = 8
    prefix_cache_bytes: Annotated[
        int, Meta(ge=0, description="memory for keeping prompts to reuse; 0 = off", extra=_BYTES)
    ] = 1 << 30
    blas: Annotated[
        str, Meta(description="BLAS library of a Linux CPU worker: auto, none, or its path", min_length=1)
    ] = "auto"

    max_body_bytes: Annotated[int, Meta(ge=1024, description="largest request body", extra=_BYTES)] = (
        8 * 1024 * 1024
    )
    request_wait_s: Annotated[
        float,
        Meta(gt=0, description="silence in the middle of a request before it is given up", extra=_SECONDS),
    ] = 60.0
    queue_limit: Annotated[int, Meta(ge=1, description="requests that may wait for a worker")] = 64
    load_wait_s: Annotated[
        float, Meta(ge=0, description="how long a request waits for a loading model", extra=_SECONDS)
    ] = 300.0
    keepalive_s: Annotated[
        float, Meta(gt=0, description="silence before an SSE keep-alive comment", extra=_SECONDS)
    ] = 5.0
    hello_s: Annotated[
        float, Meta(gt=0, description="time for a new worker's first message", extra=_SECONDS)
    ] = 10.0
    load_stall_s: Annotated[
        float, Meta(gt=0, description="loading may show no progress for so long", extra=_SECONDS)
    ] = 60.0
    load_total_s: Annotated[float, Meta(gt=0, description="loading may take so long", extra=_SECONDS)] = 900.0
    heartbeat_s: Annotated[
        float, Meta(gt=0, description="silence after which a worker counts as hung", extra=_SECONDS)
    ] = 5.0
    hung_s: Annotated[float, Meta(gt=0, description="one engine step may take so long", extra=_SECONDS)] = (
        120.0
    )
    drain_s: Annotated[
        float, Meta(ge=0, description="running answers may take so long to end at shutdown", extra=_SECONDS)
    ] = 30.0
    stop_grace_s: Annotated[
        float, Meta(ge=0, description="time between TERM and KILL of a worker", extra=_SECONDS)
    ] = 3.0
    restart_budget: Annotated[
        int, Meta(ge=0, description="restarts of a crashing worker within the window")
    ] = 3
    restart_window_s: Annotated[
        float, Meta(gt=0, description="the window of the restart budget", extra=_SECONDS)
    ] = 60.0
    half_open_s: Annotated[
        float, Meta(gt=0, description="wait before one more try once the budget is spent", extra=_SECONDS)
    ] = 60.0
    adopt_grace_s: Annotated[
        float,
        Meta(
            ge=0, description="how long workers wait for a new server when theirs was killed", extra=_SECONDS
        ),
    ] = 30.0
    reclaim_s: Annotated[
        float, Meta(ge=0, description="time for the memory of an ended worker to come back", extra=_SECONDS)
    ] = 5.0

    model_dirs: Annotated[list[str], Meta(description="further folders of models")] = []
    hf_cache: Annotated[
        str,
        Meta(
            description="Hugging Face cache to use: auto (HF_HUB_CACHE, HF_HOME), none, or its path",
            min_length=1,
        ),
    ] = "auto"
    fallback: Annotated[
        str,
        Meta(description="what serves an unknown model name: empty = nothing, resident, or a model's name"),
    ] = ""
    memory_budget_bytes: Annotated[
        int, Meta(ge=0, description="memory for all models; 0 = the machine's, less a reserve", extra=_BYTES)
    ] = 0
    max_resident: Annotated[int, Meta(ge=0, description="models in memory at a time; 0 = no limit")] = 0
    kv_bytes: Annotated[
        int, Meta(ge=0, description="KV cache of one model's running requests; 0 = by fit", extra=_BYTES)
    ] = 0
    keep_alive_s: Annotated[
        float, Meta(ge=0, description="idle time before a model is unloaded; 0 = never", extra=_SECONDS)
    ] = 0.0
    burst_requests: Annotated[
        int, Meta(ge=1, description="requests a model may still take while another waits for its memory")
    ] = 16
    burst_s: Annotated[
        float, Meta(ge=0, description="the same in time; at least twice what loading takes", extra=_SECONDS)
    ] = 10.0
    linger_s: Annotated[
        float,
        Meta(ge=0, description="idle time before a model that is in use gives way", extra=_SECONDS),
    ] = 0.25
    min_residency_s: Annotated[
        float, Meta(ge=0, description="time a loaded model stays, whoever waits", extra=_SECONDS)
    ] = 1.0
    starve_s: Annotated[
        float,
        Meta(
            gt=0,
            description="wait after which a request's model comes next, whatever is busy",
            extra=_SECONDS,
        ),
    ] = 60.0
    abandon_s: Annotated[
        float, Meta(ge=0, description="time before a load that nobody waits for is stopped", extra=_SECONDS)
    ] = 5.0
    spill_bytes: Annotated[
        int, Meta(ge=0, description="disk for the kept prompts of an unloaded model; 0 = off", extra=_BYTES)
    ] = 2 << 30
    disk_floor_bytes: Annotated[
        int, Meta(ge=0, description="disk that downloads and spills leave free", extra=_BYTES)
    ] = 1 << 30
    history_bytes: Annotated[
        int, Meta(ge=0, description="disk for stored responses; 0 = none are stored", extra=_BYTES)
    ] = 1 << 30
    history_ttl_s: Annotated[
        float, Meta(gt=0, description="how long a stored response is kept", extra=_SECONDS)
    ] = 30 * 86400.0

    log_level: Annotated[
        str,
        Meta(
            description="least severe log line to print",
            extra={"choices": ["debug", "info", "warning", "error"]},
        ),
    ] = "info"
    log_format: Annotated[
        str,
        Meta(
            description="auto = plain on a terminal, JSON lines elsewhere",
            extra={"choices": ["auto", "plain", "json"]},
        ),
    ] = "auto"


class Field(msgspec.Struct, frozen=True):
    """What is known of one setting apart from its value."""

    name: str
    type: Any  # the annotated type, for validation
    default: Any  # None for `data_dir`, which depends on the home folder
    description: str
    unit: str = ""  # "bytes", "seconds" or ""
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.removesuffix("_s").replace("_", "-")

    @property
    def variable(self) -> str:
        return "MLXD_" + self.name.upper()


class Resolved(msgspec.Struct, frozen=True):
    """The settings, the origin of each value, and notes about things that look like mistakes."""

    settings: Settings
    origins: dict[str, str]  # name -> "default", "flag --port", "MLXD_PORT", or the file's path
    config_file: Path  # whether it exists or not
    notes: list[str] = []


@cache
def fields() -> dict[str, Field]:
    """Every setting by name, in the order of the Struct."""
    hints = typing.get_type_hints(Settings, include_extras=True)
    found = {}
    for info in msgspec.structs.fields(Settings):
        (meta,) = typing.get_args(hints[info.name])[1:]
        default = info.default
        if default is msgspec.NODEFAULT:
            default = info.default_factory() if info.default_factory is not msgspec.NODEFAULT else None
        extra = meta.extra or {}
        found[info.name] = Field(
            info.name,
            hints[info.name],
            default,
            meta.description,
            extra.get("unit", ""),
            tuple(extra.get("choices", ())),
        )
    return found


def default_data_dir(home: Path) -> Path:
    """`~/.mlxd` on every platform: models are large, and people look for them, move and delete them.

    One short visible name beats `~/Library/Application Support` here and `~/.local/share` there; the
    other local model servers chose the same.
    """
    return home / ".mlxd"


def load_settings(flags: Mapping[str, str], environ: Mapping[str, str], *, home: Path) -> Resolved:
    """Flags (by field name, plus `config`) over `MLXD_*` over the file over the defaults.

    Raises `Refused` (invalid_request, `param` = the setting) naming the key, where it stands and what to do.
    """
    given: dict[str, tuple[Any, str]] = {}
    for name, known in fields().items():
        if known.variable in environ:
            given[name] = (environ[known.variable], known.variable)
        if name in flags:
            given[name] = (flags[name], f"flag {known.flag}")

    data_dir = default_data_dir(home)
    if "data_dir" in given:
        data_dir = _checked(fields()["data_dir"], *given["data_dir"])
    chosen = flags.get("config") or environ.get("MLXD_CONFIG")
    file = data_dir / "mlxd.toml"
    if chosen:
        try:
            file = _path(Path, chosen)
        except ValueError as error:
            raise refuse(
                ErrorCode.INVALID_REQUEST, f"cannot read {chosen!r}: {error}", param="config"
            ) from None
    for name, value in (_read_file(file) if chosen or _exists(file) else {}).items():
        if name == "data_dir" and not chosen:
            raise _bad(name, f"{file}", "a file inside the data folder cannot move it; use MLXD_DATA_DIR")
        given.setdefault(name, (value, str(file)))
    given.setdefault("data_dir", (str(data_dir), "default"))

    values = {name: _checked(fields()[name], value, origin) for name, (value, origin) in given.items()}
    origins = {name: given[name][1] if name in given else "default" for name in fields()}
    return Resolved(Settings(**values), origins, file, _unknown_variables(environ))


def as_written(known: Field, value: Any) -> str:
    """A value as a person writes it, without rounding; "" for nothing."""
    if known.unit == "bytes":
        return _in_unit(value, _SIZES) or f"{value} B"
    if known.unit == "seconds":
        return _in_unit(value, _TIMES) or f"{value!r}".removesuffix(".0") + "s"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


_SIZES = {" GiB": 1 << 30, " GB": 10**9, " MiB": 1 << 20, " MB": 10**6, " KiB": 1 << 10, " kB": 1000}
_TIMES = {"d": 86400, "h": 3600, "m": 60}


def _in_unit(value: float, units: Mapping[str, int]) -> str:
    for unit, size in units.items():
        if value >= size and value % size == 0:
            return f"{int(value // size)}{unit}"
    return ""


def _exists(file: Path) -> bool:
    """Whether there is such a file; one that cannot be looked at counts, so that reading it says why."""
    try:
        return file.exists()
    except (OSError, ValueError):
        return True


def _read_file(file: Path) -> dict[str, Any]:
    """The keys of `mlxd.toml`, all of them known."""
    import tomllib  # here, because it costs every command 10 ms or more, and most have no such file

    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise refuse(ErrorCode.INVALID_REQUEST, f"there is no settings file {file}", param="config") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, not TOML, or no path at all
        raise refuse(ErrorCode.INVALID_REQUEST, f"cannot read {file}: {error}", param="config") from None
    for key in table:
        if key not in fields():
            raise _bad(key, str(file), "there is no such setting" + _near(key, list(fields())))
    return table


def _checked(known: Field, value: Any, origin: str) -> Any:
    """The value in its field's type, whether it came as text or from TOML."""
    if isinstance(value, str):
        value = _from_text(known, value, origin)
    elif known.unit == "seconds" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if known.choices and value not in known.choices:
        raise _bad(known.name, origin, f"{value!r} is not one of {', '.join(known.choices)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise _bad(known.name, origin, f"{value} is not a number to count with")
    try:
        return msgspec.convert(value, known.type, dec_hook=_path)
    except msgspec.ValidationError as error:
        problem = str(error).replace("`int`", "a whole number").replace("`float`", "a number")
        raise _bad(known.name, origin, f"{problem[:1].lower()}{problem[1:]}") from None


def _from_text(known: Field, text: str, origin: str) -> Any:
    """Flags and variables are text; so are sizes and durations as people write them in the file."""
    parse: Callable[[str], Any] = {"bytes": parse_bytes, "seconds": _duration}.get(known.unit, _plain(known))
    try:
        return parse(text)
    except (ValueError, OverflowError) as error:
        raise _bad(known.name, origin, str(error)) from None


def _duration(text: str) -> float:
    seconds = parse_seconds(text)
    if seconds is None:
        raise ValueError(f"{text!r}: this duration must have an end; write for example 30s or 5m")
    return seconds


def _plain(known: Field) -> Callable[[str], Any]:
    if isinstance(known.default, int):
        return _whole_number
    if isinstance(known.default, list):
        return lambda text: [part.strip() for part in text.split(",") if part.strip()]
    return str


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


def _path(kind: type, value: Any) -> Any:
    if kind is Path and isinstance(value, str) and value and "\0" not in value:
        try:
            return Path(value).expanduser().absolute()
        except RuntimeError as error:  # ~somebody who is not here
            raise ValueError(f"{value!r}: {error}") from None
    raise ValueError("expected the path of a folder")


def _bad(name: str, origin: str, problem: str) -> Refused:
    """`port (MLXD_PORT): 'x' is not a whole number`"""
    return refuse(ErrorCode.INVALID_REQUEST, f"setting {name} ({origin}): {problem}", param=name)


def _near(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {match[0]}?" if match else "; `mlxd config show` lists them all"


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A misspelt variable is easy to miss, but another program's must not stop us: a note, not an error."""
    known = [known.variable for known in fields().values()] + ["MLXD_CONFIG"]
    notes = []
    for name in environ:
        match = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name.startswith("MLXD_") and name not in known and match:
            notes.append(f"the variable {name} is not a setting; did you mean {match[0]}?")
    return notes
