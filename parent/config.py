"""Settings: one Struct; each value comes from a flag, the environment, `mlxd.toml` or its default.

The Struct is the form, the validation and the documentation: a field's `Meta` carries its bounds, what it is
for, and (`extra`) the unit in which people write it and what a change needs to be in force. `load_settings`
remembers where each value came from. What is said of single models is in `parent/model_options.py`.
"""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from parent.model_options import OVER_SETTINGS, ModelOptions, models_from
from parent.values import Field, as_path, bad, checked, fields_of, near
from shared.errors import ErrorCode, refuse
from shared.files import NotRegular, read_regular
from shared.providers import PROVIDERS

_BYTES = {"unit": "bytes"}
_SECONDS = {"unit": "seconds"}
_RESTART = {"needs": "restart"}
_RELOAD = {"needs": "model reload"}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of `mlxd serve`. Durations are seconds, sizes are bytes, 0 means the engine's choice."""

    data_dir: Annotated[Path, Meta(description="everything mlxd writes lives below it", extra=_RESTART)]
    host: Annotated[str, Meta(min_length=1, description="address to listen on", extra=_RESTART)] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="TCP port to listen on; 0 = any free one", extra=_RESTART)
    ] = 8080
    model: Annotated[
        str,
        Meta(
            description="name or folder of the model that is meant by default; empty = the starter or the first",
            extra=_RESTART,
        ),
    ] = ""
    allowed_hosts: Annotated[
        list[str],
        Meta(description="further Host names to answer to; loopback names always are", extra=_RESTART),
    ] = []

    dtype: Annotated[
        str,
        Meta(
            description="type of the activations; auto = float32 on mlx's CPU backend, else the checkpoint's",
            extra={**_RELOAD, "choices": ["auto", "float32", "float16", "bfloat16"]},
        ),
    ] = "auto"
    max_context: Annotated[
        int, Meta(ge=0, description="tokens of context to offer; 0 = the model's", extra=_RELOAD)
    ] = 0
    prefill_chunk: Annotated[
        int, Meta(ge=0, description="prompt tokens in one prefill step; 0 = by device", extra=_RELOAD)
    ] = 0
    max_rows: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="requests answered side by side; 1 = each by itself, and the same to the last bit each time",
            extra={**_RELOAD, "also": "--batch"},
        ),
    ] = 8
    prefix_cache_bytes: Annotated[
        int,
        Meta(ge=0, description="memory for keeping prompts to reuse; 0 = off", extra={**_BYTES, **_RELOAD}),
    ] = 1 << 30
    kv_cache: Annotated[
        str,
        Meta(
            description="how keys and values are kept: full, in 8 or 4 bits, or as the model's kv_config.json says; "
            "auto = by that file where there is one, else full",
            extra={**_RELOAD, "choices": ["auto", "full", "kv8", "kv4", "config"]},
        ),
    ] = "auto"
    kv_start: Annotated[
        int,
        Meta(
            ge=0,
            description="tokens at the beginning that are never quantized, rounded up to 64",
            extra=_RELOAD,
        ),
    ] = 0
    check_prefix: Annotated[
        bool,
        Meta(
            description="for debugging: run prompts that are reused whole as well, and log how far logits differ",
            extra=_RELOAD,
        ),
    ] = False
    provider: Annotated[
        str,
        Meta(
            description="whose model code: native, that of the extra mlx-lm, or auto = native where the family is "
            "ours, else mlx-lm where it is installed",
            extra={**_RELOAD, "choices": list(PROVIDERS)},
        ),
    ] = "auto"
    blas: Annotated[
        str,
        Meta(
            description="BLAS library of a Linux CPU worker: auto, none, or its path",
            min_length=1,
            extra=_RELOAD,
        ),
    ] = "auto"

    strict: Annotated[bool, Meta(description="refuse requests with fields that are not known")] = False
    reasoning_field: Annotated[
        str,
        Meta(
            description="where a model's thinking stands in answers of the OpenAI formats",
            extra={"choices": ["reasoning_content", "reasoning", "both"]},
        ),
    ] = "reasoning_content"
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
        float,
        Meta(gt=0, description="loading may show no progress for so long", extra=_SECONDS),
    ] = 60.0
    load_total_s: Annotated[float, Meta(gt=0, description="loading may take so long", extra=_SECONDS)] = 900.0
    heartbeat_s: Annotated[
        float,
        Meta(gt=0, description="silence after which a worker counts as hung", extra={**_SECONDS, **_RELOAD}),
    ] = 5.0
    hung_s: Annotated[
        float, Meta(gt=0, description="one engine step may take so long", extra={**_SECONDS, **_RELOAD})
    ] = 120.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            description="running answers may take so long to end at shutdown",
            extra=_SECONDS,
        ),
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
        float,
        Meta(
            gt=0,
            description="wait before one more try once the budget is spent",
            extra=_SECONDS,
        ),
    ] = 60.0
    adopt_grace_s: Annotated[
        float,
        Meta(
            ge=0,
            description="how long workers wait for a new server when theirs was killed",
            extra={**_SECONDS, **_RELOAD},
        ),
    ] = 30.0
    reclaim_s: Annotated[
        float,
        Meta(
            ge=0,
            description="time for the memory of an ended worker to come back",
            extra=_SECONDS,
        ),
    ] = 5.0

    model_dirs: Annotated[list[str], Meta(description="further folders of models")] = []
    adapter_roots: Annotated[list[str], Meta(description="further folders of adapters")] = []
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
        int,
        Meta(
            ge=0,
            description="KV cache of one model's running requests; 0 = by fit",
            extra={**_BYTES, **_RELOAD},
        ),
    ] = 0
    keep_alive_s: Annotated[
        float,
        Meta(
            ge=0,
            description="idle time before a model is unloaded; 0 = never",
            extra={**_SECONDS, "zero_is_never": True},
        ),
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
        int,
        Meta(
            ge=0,
            description="disk for the kept prompts of all models together; 0 = off",
            extra={**_BYTES, **_RELOAD},
        ),
    ] = 2 << 30
    disk_floor_bytes: Annotated[
        int, Meta(ge=0, description="disk that downloads and spills leave free", extra={**_BYTES, **_RELOAD})
    ] = 1 << 30
    history_bytes: Annotated[
        int,
        Meta(
            ge=0, description="disk for stored responses; 0 = none are stored", extra={**_BYTES, **_RESTART}
        ),
    ] = 1 << 30
    history_ttl_s: Annotated[
        float, Meta(gt=0, description="how long a stored response is kept", extra={**_SECONDS, **_RESTART})
    ] = 30 * 86400.0

    jobs_run: Annotated[
        str,
        Meta(
            description="when jobs on the GPU run: beside the models, in idle moments alone, or exclusive, so that "
            "requests wait for them; but for exclusive they wait between two steps while answers run",
            extra={"choices": ["beside", "idle", "exclusive"]},
        ),
    ] = "beside"
    jobs_quiet_s: Annotated[
        float,
        Meta(ge=0, description="silence after the last answer before such a job goes on", extra=_SECONDS),
    ] = 2.0
    jobs_keep_days: Annotated[
        int,
        Meta(
            ge=0, le=36500, description="days before a job that is over is forgotten; pinned ones never are"
        ),
    ] = 90
    jobs_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="disk for the logs and checkpoints of jobs that are over; beyond it the oldest are forgotten",
            extra=_BYTES,
        ),
    ] = 4 << 30
    dataset_dirs: Annotated[list[str], Meta(description="further folders of data sets")] = []

    log_level: Annotated[
        str,
        Meta(
            description="least severe log line to print",
            extra={**_RESTART, "choices": ["debug", "info", "warning", "error"]},
        ),
    ] = "info"
    log_format: Annotated[
        str,
        Meta(
            description="auto = plain on a terminal, JSON lines elsewhere",
            extra={**_RESTART, "choices": ["auto", "plain", "json"]},
        ),
    ] = "auto"


class Resolved(msgspec.Struct, frozen=True):
    """The settings, the origin of each value, what is said of single models, and notes about likely mistakes."""

    settings: Settings
    origins: dict[str, str]  # name -> "default", "flag --port", "MLXD_PORT", or the file's path
    config_file: Path  # whether it exists or not
    notes: list[str] = []
    models: dict[str, ModelOptions] = {}  # by the id as it is written in the file


def fields() -> dict[str, Field]:
    """Every setting by name, in the order of the Struct."""
    return fields_of(Settings)


def for_model(settings: Settings, options: ModelOptions) -> Settings:
    """The settings of one model: its own options over the flat ones."""
    over = {name: value for name in OVER_SETTINGS if (value := getattr(options, name)) is not None}
    if options.keep_alive is not None:
        over["keep_alive_s"] = options.keep_alive
    return msgspec.structs.replace(settings, **over)


def default_data_dir(home: Path) -> Path:
    """`~/.mlxd` on every platform: models are large, and people look for them, move and delete them.

    One short visible name beats `~/Library/Application Support` here and `~/.local/share` there; the
    other local model servers chose the same.
    """
    return home / ".mlxd"


def load_settings(
    flags: Mapping[str, str], environ: Mapping[str, str], *, home: Path, text: str | None = None
) -> Resolved:
    """Flags (by field name, plus `config`) over `MLXD_*` over the file over the defaults.

    `text`: read this in place of the file's own content. Raises `Refused` (invalid_request, `param` = the
    setting) naming the key, where it stands and what to do.
    """
    given: dict[str, tuple[Any, str]] = {}
    for name, known in fields().items():
        if known.variable in environ:
            given[name] = (environ[known.variable], known.variable)
        if name in flags:
            given[name] = (flags[name], f"flag {known.flag}")

    data_dir = default_data_dir(home)
    if "data_dir" in given:
        data_dir = checked(fields()["data_dir"], *given["data_dir"])
    chosen = flags.get("config") or environ.get("MLXD_CONFIG")
    file = data_dir / "mlxd.toml"
    if chosen:
        try:
            file = as_path(Path, chosen)
        except ValueError as error:
            raise refuse(
                ErrorCode.INVALID_REQUEST, f"cannot read {chosen!r}: {error}", param="config"
            ) from None
    if text is None and file == Path(os.devnull):
        text = ""  # the one device that is a way of saying: no file at all
    if text is None and (chosen or _exists(file)):
        text = read_text(file)
    table = parse_file(text, file) if text else {}
    models = models_from(table.pop("models", {}), str(file))
    for name, value in table.items():
        if name == "data_dir" and not chosen:
            raise bad(name, f"{file}", "a file inside the data folder cannot move it; use MLXD_DATA_DIR")
        given.setdefault(name, (value, str(file)))
    given.setdefault("data_dir", (str(data_dir), "default"))

    values = {name: checked(fields()[name], value, origin) for name, (value, origin) in given.items()}
    origins = {name: given[name][1] if name in given else "default" for name in fields()}
    return Resolved(Settings(**values), origins, file, _unknown_variables(environ), models)


def _exists(file: Path) -> bool:
    """Whether anything has this name; what cannot be looked at counts, so that reading it says why."""
    try:
        file.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def read_text(file: Path) -> str:
    """The settings file. Raises `Refused` (invalid_request, `param` config)."""
    try:
        return read_regular(file).decode().replace("\r\n", "\n")
    except NotRegular as error:
        problem = f"cannot read {file}: it is {error.strerror}"
        raise refuse(ErrorCode.INVALID_REQUEST, problem, param="config") from None
    except FileNotFoundError:
        raise refuse(ErrorCode.INVALID_REQUEST, f"there is no settings file {file}", param="config") from None
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no path at all
        raise refuse(ErrorCode.INVALID_REQUEST, f"cannot read {file}: {error}", param="config") from None


def parse_file(text: str, file: Path) -> dict[str, Any]:
    """The keys of `mlxd.toml`, all of them known. Raises `Refused`."""
    import tomllib  # here, because it costs every command 10 ms or more, and most have no such file

    try:
        table = tomllib.loads(text)
    except RecursionError:
        problem = f"cannot read {file}: a value is nested too deep; write it flatter"
        raise refuse(ErrorCode.INVALID_REQUEST, problem, param="config") from None
    except ValueError as error:
        raise refuse(ErrorCode.INVALID_REQUEST, f"cannot read {file}: {error}", param="config") from None
    for key in table:
        if key not in fields() and key != "models":
            raise bad(key, str(file), f"there is no such setting{near_setting(key)}")
    return table


def near_setting(word: str) -> str:
    """What to say after the name of a setting that does not exist."""
    return near(word, [*fields(), "models"], "`mlxd config show` lists them all")


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A misspelt variable is easy to miss, but another program's must not stop us: a note, not an error."""
    known = [known.variable for known in fields().values()] + ["MLXD_CONFIG"]
    notes = []
    for name in environ:
        match = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if name.startswith("MLXD_") and name not in known and match:
            notes.append(f"the variable {name} is not a setting; did you mean {match[0]}?")
    return notes
