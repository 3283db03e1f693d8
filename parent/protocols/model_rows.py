"""Rows of `GET /v1/models`: OpenAI's with what other servers add to them, and Anthropic's, page by page. Pure."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from parent.protocols.limits import shown
from parent.protocols.refusing import invalid
from shared import wire

ModelState = Literal["resident", "loading", "on_disk", "leaving", "failed"]
USUAL, MOST = 20, 1000


class Modalities(msgspec.Struct, frozen=True):
    """What goes in and comes out."""

    input: list[str]
    output: list[str]


class Defaults(msgspec.Struct, frozen=True):
    """A loaded model's own; null = none."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One model. The names for its context are those that clients of OpenAI, vLLM and LM Studio look for.

    `support`: by what it is served. `fits`: on this machine alone; bytes as in `/admin/fit`, null = not known.
    `state`: where it is now; `worker`: its process, in the words of table W. `parent`: of `model:adapter` the model.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mlxd"
    parent: str | None = None
    aliases: list[str]
    profiles: list[str]
    adapters: list[str] = []
    kind: str
    capabilities: list[str]
    modalities: Modalities
    context_window: int
    context_length: int
    max_model_len: int
    max_context_length: int
    quantization: str
    bytes: int
    size_bytes: int
    family: str
    arch: str
    root: str
    support: Literal["native", "extra", "unsupported"]
    fits: Literal["fully", "partly", "no"] | None
    total_bytes: int | None
    loads_with_bytes: int | None
    usable_bytes: int
    state: ModelState
    worker: str
    resident: bool
    loading: bool
    pinned: bool
    gen_defaults: Defaults


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelRow]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One model to clients of Anthropic."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int
    max_tokens: int


class ModelPage(msgspec.Struct, frozen=True):
    """`GET /v1/models` to them."""

    data: list[ModelInfo]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Moved(msgspec.Struct, frozen=True):
    """The answer of `load` and `unload`: the worker's state, and what it means to the pool."""

    model: str
    state: str
    phase: str


def page(rows: list[ModelInfo], query: Mapping[str, str]) -> ModelPage:
    """So many rows after or before one. Raises `Refused` naming the parameter."""
    limit = query.get("limit", str(USUAL))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MOST):
        raise invalid("limit", f"must be from 1 to {MOST}, not {shown(limit)}")
    ids = [row.id for row in rows]
    begin, end = 0, len(rows)
    if after := query.get("after_id"):
        begin = _place(ids, after, "after_id") + 1
    if before := query.get("before_id"):
        end = _place(ids, before, "before_id")
    between = rows[begin:end]
    is_backward = bool(before) and not after
    found = between[-int(limit) :] if is_backward else between[: int(limit)]
    first, last = (found[0].id, found[-1].id) if found else (None, None)
    return ModelPage(found, len(found) < len(between), first, last)


def _place(ids: list[str], id: str, name: str) -> int:
    if id not in ids:
        raise invalid(name, f"there is no model {shown(id)}")
    return ids.index(id)


def modalities(kind: str) -> Modalities:
    """Of a model of this kind: text goes in, and out where it writes."""
    return Modalities(["text"], ["text"] if kind == "chat" else [])


def with_adapter(row: ModelRow, adapter: str, num_bytes: int) -> ModelRow:
    """The row of a model that runs with an adapter."""
    return msgspec.structs.replace(
        row,
        id=f"{row.id}:{adapter}",
        parent=row.id,
        aliases=[f"{name}:{adapter}" for name in row.aliases],
        profiles=[],
        adapters=[adapter],
        bytes=row.bytes + num_bytes,
        size_bytes=row.bytes + num_bytes,
    )


def info(row: ModelRow, created_at: str) -> ModelInfo:
    """The same model to clients of Anthropic."""
    context = row.context_window
    return ModelInfo(
        id=row.id, display_name=row.id, created_at=created_at, max_input_tokens=context, max_tokens=context
    )


def defaults(of: wire.Sampling) -> Defaults:
    """What a model says of itself."""
    return Defaults(of.temperature, of.top_p, of.top_k, of.min_p)
