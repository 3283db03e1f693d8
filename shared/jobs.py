"""Jobs: long work that runs in a worker process of its own; one Struct per kind.

The Struct of a kind is its form, its validation and its wire format.
"""

import msgspec


class NoopJob(msgspec.Struct, frozen=True, tag="noop"):
    """Counts `steps` steps; for checks of the job machinery."""

    steps: int = 3


class ImportGguf(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="import_gguf"):
    """Convert a GGUF file of a family that is ours to a model directory.

    `dtype`: "auto" picks what is fastest on this device (float32 on mlx's CPU backend, the file's own
    quantization elsewhere); "keep" keeps the quantization; else float32, float16 or bfloat16.
    """

    source: str  # path of the .gguf
    name: str  # shown in messages and written into the directory's `mlxd.json`
    dtype: str = "auto"
    origin: str = ""  # where the file came from, for `mlxd.json`
    aliases: list[str] = []  # other names of the model, for `mlxd.json`


class PullRepo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pull"):
    """Download a model repository into the Hugging Face cache, every file checked by its hash.

    Endpoint and token come from the environment (`HF_ENDPOINT`, `HF_TOKEN`), as `huggingface_hub` reads them.
    """

    repo: str  # org/name
    revision: str = ""  # branch, tag or commit; "" = main
    cache_dir: str = ""  # the hub cache; "" = huggingface_hub's own choice
    floor_bytes: int = 1 << 30  # of the disk, to be left free


JobSpec = NoopJob | ImportGguf | PullRepo


class JobStarted(msgspec.Struct, frozen=True, tag="started"):
    """The job has begun its work."""


class JobStage(msgspec.Struct, frozen=True, tag="stage"):
    """`done` of `total` units of the named stage."""

    stage: str
    done: int = 0
    total: int = 0
    message: str = ""


class JobLog(msgspec.Struct, frozen=True, tag="log"):
    """One line for the job's log."""

    line: str


class JobDone(msgspec.Struct, frozen=True, tag="done"):
    """The job is finished; `output` is the path it made, `summary` one line for a person."""

    output: str = ""
    summary: str = ""


JobEvent = JobStarted | JobStage | JobLog | JobDone
