"""What a model will need, before anything is loaded: the bill that the ledger reserves by."""

from typing import Literal

import msgspec

from parent.config import Settings
from parent.library.catalog import ModelEntry
from parent.library.fit import bill as fit_bill
from parent.library.fit import kv_layout_of
from parent.library.machine import Device
from parent.model_options import OVER_SETTINGS, ModelOptions
from parent.pool.ledger import Bill
from shared.control import LaunchModel
from shared.encoders import is_encoder
from shared.kv_layout import kv_room

ORDINARY = 4096  # tokens of a request that any loaded model has to be able to take
GENEROUS = 32768  # tokens of the longest request that is provided for where there is room
EACH_ROW = 2048  # tokens of a row when all rows are busy


def bill_of(entry: ModelEntry, launch: LaunchModel, device: Device) -> Bill:
    """The bill of `entry` as `launch` would load it. A model that says nothing of itself costs its weights."""
    if not entry.config:
        return Bill(weights=entry.bytes, kv_least=launch.kv_bytes, kv_wish=launch.kv_bytes)
    context = min(filter(None, (launch.max_context, entry.context)), default=ORDINARY)
    fit = fit_bill(
        entry,
        context if is_encoder(entry.config) else min(context, ORDINARY),
        device,
        launch,
    )
    if is_encoder(entry.config):
        return Bill(weights=fit.weights_bytes, transient=fit.transient_bytes, kv_least=0, kv_wish=0)
    layers = kv_layout_of(entry, launch.kv_cache, launch.kv_start)

    def row(tokens: int) -> int:
        """What the worker's buffers for a row take, which is more than its keys and values."""
        return kv_room(layers, min(context, tokens), fit.chunk, fit.element_bytes)

    return Bill(
        weights=fit.weights_bytes,
        transient=fit.transient_bytes,
        kv_least=launch.kv_bytes or row(ORDINARY),
        kv_wish=launch.kv_bytes or max(row(GENEROUS), launch.max_rows * row(EACH_ROW)),
        prefix_wish=launch.prefix_cache_bytes,
    )


class Room(msgspec.Struct, frozen=True):
    """Whether a model fits on this machine alone, and the bytes that say so; null = not known.

    `fits`: `fully` = a busy server at the whole context, as `mlxd fit` counts; `partly` = it can be loaded, for
    fewer tokens at a time; `no` = it cannot.
    """

    fits: Literal["fully", "partly", "no"] | None
    total_bytes: int | None
    loads_with_bytes: int | None
    usable_bytes: int


def room_of(entry: ModelEntry, launch: LaunchModel, device: Device, adapters: int = 0) -> Room:
    """The verdict on `entry` as `launch` would load it, with so many bytes of adapters."""
    usable = device.budget_bytes
    if entry.error or not entry.config:
        return Room(None, None, None, usable)
    fit = fit_bill(
        entry,
        min(filter(None, (launch.max_context, entry.context)), default=ORDINARY),
        device,
        launch,
    )
    total, least = fit.needed_bytes + adapters, bill_of(entry, launch, device).least + adapters
    if least > usable:
        return Room("no", total, least, usable)
    return Room("fully" if total <= usable else "partly", total, least, usable)


class Recipe(msgspec.Struct, frozen=True):
    """How a model's worker is to be started: what a change of settings can change."""

    launch: LaunchModel  # with the settings' caps; what the ledger grants comes in at the spawn
    command: tuple[str, ...]
    signature: str = ""  # of the model's files


def recipe_of(
    entry: ModelEntry, options: ModelOptions, settings: Settings, command: list[str], spill_dir: str
) -> Recipe:
    """How the settings, with the model's own above them, would start a worker of `entry`."""
    values = {name: getattr(settings, name) for name in OVER_SETTINGS}
    values |= {name: given for name in OVER_SETTINGS if (given := getattr(options, name)) is not None}
    launch = LaunchModel(
        model_id=entry.id,
        path=str(entry.path),
        spill_dir=spill_dir if settings.spill_bytes else "",
        spill_bytes=settings.spill_bytes,
        disk_floor_bytes=settings.disk_floor_bytes,
        grace_s=settings.adopt_grace_s,
        messages=options.messages,
        **values,
    )
    return Recipe(launch, (options.python or command[0], *command[1:]), entry.signature)
