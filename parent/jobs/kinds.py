"""What the queue has to know of each kind of job, beside its Struct in `shared/jobs.py`. Pure."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from shared.jobs import ImportGguf, JobSpec, NoopJob, PullRepo
from shared.lab import Benchmark, Dataset, Evaluate, Fuse, MergeAdapters, Push, Quantize


class Kind(NamedTuple):
    """`resumable`: may be stopped at any time and goes on where it was. `grows`: the stage whose count shows that a try
    got further than the one before. `exclusive`: what only one job at a time may touch, as a key; "" = nothing.
    """

    resumable: bool = False
    grows: str = ""
    exclusive: Callable[[Any], str] = lambda spec: ""


KINDS: dict[type[JobSpec], Kind] = {
    NoopJob: Kind(),
    ImportGguf: Kind(),
    Fuse: Kind(),
    MergeAdapters: Kind(),
    Quantize: Kind(resumable=True, grows="quantize"),
    # The hub's names are the same in any case, and so are those of the cache on a Mac.
    PullRepo: Kind(resumable=True, grows="download", exclusive=lambda spec: f"pull {spec.repo.lower()}"),
    Dataset: Kind(resumable=True, grows="make"),
    Evaluate: Kind(),
    Benchmark: Kind(),
    Push: Kind(resumable=True, grows="upload", exclusive=lambda spec: f"push {spec.repo.lower()}"),
}

_by_tag = {str(spec.__struct_config__.tag): kind for spec, kind in KINDS.items()}
_decode = msgspec.json.Decoder(JobSpec).decode


def tag_of(spec: JobSpec) -> str:
    """The name of its kind."""
    return str(type(spec).__struct_config__.tag)


def kind_of(tag: str) -> Kind:
    """What is known of a kind; one of another version of mlxd is not resumable."""
    return _by_tag.get(tag, Kind())


def exclusive_of(spec: JobSpec) -> str:
    """What only one job at a time may touch."""
    return KINDS[type(spec)].exclusive(spec)


def decode_spec(data: str | bytes) -> JobSpec:
    """The spec of a row. Raises msgspec.ValidationError where its kind is of another version of mlxd."""
    return _decode(data)
