"""What the queue has to know of each kind of job, beside its Struct in `shared/jobs.py`. Pure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from shared.jobs import CountJob, ImportGguf, JobSpec, NoopJob, PullRepo
from shared.lab import Benchmark, Dataset, Evaluate, Finetune, Fuse, MergeAdapters, Push, Quantize


class Kind(NamedTuple):
    """`resumable`: may be stopped at any time and goes on where it was. `grows`: the stage whose count shows that a try
    got further than the one before. `exclusive`: what only one job at a time may touch, as a key; "" = its output.
    `uses_gpu`: it needs a place in memory, and waits between two steps while answers run. `save_s`: how long it may
    take to its next step and a checkpoint, when it is paused. `saves_memory`: what would help where it ran out.
    """

    resumable: bool = False
    grows: str = ""
    exclusive: Callable[[Any], str] = lambda spec: ""
    uses_gpu: bool = False
    save_s: float = 0.0
    saves_memory: str = ""


KINDS: dict[type[JobSpec], Kind] = {
    NoopJob: Kind(),
    CountJob: Kind(resumable=True, grows="counting", uses_gpu=True),
    ImportGguf: Kind(),
    Fuse: Kind(),
    MergeAdapters: Kind(),
    Quantize: Kind(
        resumable=True,
        grows="quantize",
        uses_gpu=True,
        save_s=60.0,
        saves_memory="measure false, or no target_bpw: then a shard and a layer are enough",
    ),
    # The hub's names are the same in any case, and so are those of the cache on a Mac.
    PullRepo: Kind(resumable=True, grows="download", exclusive=lambda spec: f"pull {spec.repo.lower()}"),
    Dataset: Kind(resumable=True, grows="make"),
    Evaluate: Kind(uses_gpu=True, saves_memory="a smaller sequence_length, or no reference"),
    Benchmark: Kind(),
    Push: Kind(resumable=True, grows="upload", exclusive=lambda spec: f"push {spec.repo.lower()}"),
    Finetune: Kind(
        resumable=True,
        grows="train",
        uses_gpu=True,
        save_s=60.0,
        saves_memory="a smaller batch_size or max_seq_length, grad_checkpoint, segment_size or head_chunk",
    ),
}

_by_tag = {str(spec.__struct_config__.tag): kind for spec, kind in KINDS.items()}
_decode = msgspec.json.Decoder(JobSpec).decode


def tag_of(spec: JobSpec | type[JobSpec]) -> str:
    """The name of its kind."""
    return str(spec.__struct_config__.tag)


def kind_of(tag: str) -> Kind:
    """What is known of a kind; one of another version of mlxd is not resumable."""
    return _by_tag.get(tag, Kind())


def is_known(spec: type[JobSpec]) -> bool:
    """Whether jobs of this kind can be run."""
    return spec in KINDS


def exclusive_of(spec: JobSpec, output: str = "") -> str:
    """What only one job at a time may touch."""
    made = f"output {output.casefold()}" if output else ""
    return KINDS.get(type(spec), Kind()).exclusive(spec) or made


def decode_spec(data: str | bytes) -> JobSpec:
    """The spec of a row. Raises msgspec.ValidationError where its kind is of another version of mlxd."""
    return _decode(data)
