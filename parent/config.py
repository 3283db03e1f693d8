"""Settings: one Struct; each value comes from a flag, the environment, `mlxd.toml` or its default."""

from pathlib import Path

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of `mlxd serve`. Durations are seconds, sizes are bytes, 0 means the engine's choice."""

    data_dir: Path  # everything we write lives below it
    host: str = "127.0.0.1"
    port: int = 8080
    model: str = ""  # name or directory of the model to serve; "" = the only or the starter one
    allowed_hosts: list[str] = []  # further Host names that may be asked for (loopback always may)

    dtype: str = "auto"
    max_context: int = 0
    prefill_chunk: int = 0
    max_rows: int = 8
    prefix_cache_bytes: int = 1 << 30
    blas: str = "auto"  # Linux CPU: "auto", "none", or the path of a BLAS library for the worker

    max_body_bytes: int = 32 * 1024 * 1024
    queue_limit: int = 64  # requests that may wait for a worker
    load_wait_s: float = 300.0  # how long a request waits for a loading model
    keepalive_s: float = 5.0  # an SSE comment goes out after so much silence
    hello_s: float = 10.0
    load_stall_s: float = 60.0
    load_total_s: float = 900.0
    heartbeat_s: float = 5.0
    hung_s: float = 120.0  # one engine step may take so long
    drain_s: float = 30.0
    stop_grace_s: float = 3.0  # between TERM and KILL
    restart_budget: int = 3
    restart_window_s: float = 60.0
    half_open_s: float = 60.0

    log_level: str = "info"
    log_format: str = "auto"  # auto, plain, json
