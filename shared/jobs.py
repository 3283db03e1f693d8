"""Jobs: long work that runs in a worker process of its own; one Struct per kind.

The Struct of a kind is its form, its validation and its wire format; those of the lab are in `shared/lab.py`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from shared.lab import LabSpec


class NoopJob(msgspec.Struct, frozen=True, tag="noop"):
    """Counts `steps` steps; for checks of the job machinery."""

    steps: int = 3


class CountJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="count"):
    """Counts `steps` steps of `step_s` each, with a checkpoint after every `steps_per_save` (0 = none); what comes out
    depends on every step. For checks of the job machinery; it asks for the GPU and for `bytes` of memory.
    """

    steps: Annotated[int, Meta(ge=0, lt=2**53)] = 10
    step_s: Annotated[float, Meta(ge=0, le=3600)] = 0.0
    steps_per_save: Annotated[int, Meta(ge=0, lt=2**53)] = 0
    bytes: Annotated[int, Meta(ge=0, lt=2**53)] = 0


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


JobSpec = NoopJob | CountJob | ImportGguf | PullRepo | LabSpec


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


class JobMetric(msgspec.Struct, frozen=True, omit_defaults=True, tag="metric"):
    """What a training step, or an evaluation, measured. `step` counts from 1; `loss` is a mean a token, in nats."""

    kind: Literal["train", "val"]
    step: int
    loss: float
    learning_rate: float | None = None
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    grad_norm: float | None = None
    accuracy: float | None = None  # dpo and orpo: share of pairs where the chosen one is likelier
    margin: float | None = None
    peak_bytes: int | None = None
    tokens: int | None = None  # trained on so far


class JobSaved(msgspec.Struct, frozen=True, tag="saved"):
    """The job could go on from here: `resume` is what its next start is told, `step` how far it is."""

    resume: str
    step: int = 0


class JobDone(msgspec.Struct, frozen=True, tag="done"):
    """The job is finished; `output` is the path it made, `summary` one line for a person, `result` what it found."""

    output: str = ""
    summary: str = ""
    result: dict[str, Any] = {}


JobEvent = JobStarted | JobStage | JobLog | JobMetric | JobSaved | JobDone
