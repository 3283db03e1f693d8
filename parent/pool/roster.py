"""Which models the pool has: the library's, each with its host, kept true to the settings and to the disk."""

import contextlib
import hashlib
import time
from collections.abc import Collection

from msgspec.structs import replace

from parent.config import Settings
from parent.library.adapters import Shelved, parsed
from parent.library.catalog import ModelEntry
from parent.library.library import Library
from parent.library.machine import Device
from parent.library.names import Found, Names
from parent.model_options import ModelOptions
from parent.pool import rollout
from parent.pool.crew import Crew, forgive
from parent.pool.desk import FOREVER, Desk, Phase
from parent.pool.estimate import Recipe, bill_of, recipe_of
from parent.pool.host import Host
from parent.pool.models import RESIDENT, Choice, choose
from shared.control import LaunchModel
from shared.errors import ErrorCode, Refused, refuse
from shared.units import format_bytes

_PRESENT = (Phase.LOADING, Phase.READY)


class Roster:
    """`default`: id of the model that a request without a name means ("" = none)."""

    def __init__(
        self, library: Library, desk: Desk, crew: Crew, device: Device, settings: Settings, default: str
    ) -> None:
        self.library = library
        self.device = device
        self.settings = settings
        self.default = default
        self.hosts: dict[str, Host] = {}
        self._missing: set[str] = set()  # models that have a host and were not on disk at the last look
        self._desk = desk
        self._crew = crew

    # ------------------------------------------------------------ names

    async def known(self, name: str) -> Found:
        """The model of a name, after a look at the disk where it is unknown, broken, or not in memory.

        Raises `Refused` (model_not_found).
        """
        with contextlib.suppress(Refused):
            found = self.library.resolve(name)
            host = self.hosts.get(found.entry.id)
            if host is not None and host.slot.phase in _PRESENT and not found.entry.error:
                return found
        await self.look()
        return self.library.resolve(name)

    async def choose(self, name: str, kinds: Collection[str] = ("chat",)) -> Choice:
        """The model of a request; where its name is unknown the disk is looked at, then the fallback counts.

        What is resident stands in only for its own kind: one of `kinds`.

        Raises `Refused` (model_not_found).
        """
        if name:
            with contextlib.suppress(Refused):
                found = await self.known(name)
                return Choice(found.entry, found.profile, adapters=found.adapters)
        ready = [host for host in self.hosts.values() if host.slot.phase is Phase.READY]
        ready.sort(key=lambda host: -host.slot.last_used)
        residents = [host.entry for host in ready if host.entry.kind in kinds]
        fallback = self.settings.fallback
        if fallback == RESIDENT and not residents and "chat" not in kinds:
            fallback = ""  # the default would be of another kind
        return choose(
            name,
            self.library.resolve,
            default=self.default,
            fallback=fallback,
            residents=residents,
        )

    async def adapters(self, choice: Choice, asked: list[str] | None) -> tuple[Shelved, ...]:
        """What a request runs with: `asked` are those of its own field (None = it says nothing).

        Else those of the model's name, of the profile, of the model's options. Raises `Refused`.
        """
        if asked is None and choice.adapters is not None:
            return choice.adapters
        names = asked
        if names is None:
            profile = choice.profile.adapter if choice.profile else ""
            names = parsed(profile or self.library.options(choice.entry.id).adapter)
        if not names and not choice.adapters:
            return ()
        try:
            found = self.library.adapters(choice.entry, names)
        except Refused as refused:
            if refused.failure.code is not ErrorCode.MODEL_NOT_FOUND:
                raise
            await self.look()
            found = self.library.adapters(choice.entry, names)
        if choice.adapters is not None and [one.id for one in choice.adapters] != [one.id for one in found]:
            raise refuse(
                ErrorCode.INVALID_REQUEST,
                f"the model's name asks for adapter {'+'.join(one.id for one in choice.adapters)}, and the field for "
                f"{'+'.join(one.id for one in found) or 'none'}; write one of them",
                param="adapter",
            )
        return found

    # ------------------------------------------------------------ hosts

    def host(self, entry: ModelEntry) -> Host:
        """The host of a model, made on first use and brought up to date."""
        options = self.library.options(entry.id)
        recipe = self._recipe(entry, options, self.settings)
        host = self.hosts.get(entry.id)
        if host is None:
            host = self._new_host(entry, recipe)
        elif entry.error and host.slot.phase in _PRESENT:
            return host  # what is in memory is better than what lies there now
        elif host.entry is entry and host.options == options and recipe in (host.recipe, host.bad):
            return host
        if recipe == host.bad and host.good is not None:
            recipe = host.good
        was_replaced = host.recipe.signature != recipe.signature
        host.entry, host.options, host.recipe = entry, options, recipe
        slot = host.slot
        slot.bill = replace(bill_of(entry, recipe.launch, self.device), adapters=host.adapter_bytes)
        slot.is_pinned = options.pin
        keep = self.settings.keep_alive_s if options.keep_alive is None else options.keep_alive
        if keep != host.keep_alive_s:  # else what a request has said of it stands
            host.keep_alive_s = keep
            slot.keep_alive_s = keep or FOREVER
        if slot.phase is Phase.REFUSED and was_replaced:
            forgive(self._desk, host, time.monotonic())  # what failed was another model
        return host

    def _new_host(self, entry: ModelEntry, recipe: Recipe) -> Host:
        slot, supervisor = self._desk.slot(entry.id), self._crew.make(recipe.launch)
        slot.account = supervisor.name
        host = self.hosts[entry.id] = self._crew.hosts[supervisor] = Host(entry, slot, recipe, supervisor)
        return host

    def launch(self, entry: ModelEntry) -> LaunchModel:
        """How the settings would load a model; it gets no host by that."""
        return self._recipe(entry, self.library.options(entry.id), self.settings).launch

    def _recipe(self, entry: ModelEntry, options: ModelOptions, settings: Settings) -> Recipe:
        folder = hashlib.blake2b(str(entry.path).encode(), digest_size=12).hexdigest()
        spill = settings.data_dir / "cache" / "kv" / folder
        return recipe_of(entry, options, settings, self._crew.command, str(spill))

    def pinned(self) -> list[ModelEntry]:
        """What is to be loaded at start and kept."""
        return [
            entry for entry in self.library.entries if self.library.options(entry.id).pin and not entry.error
        ]

    # ------------------------------------------------------------ changes

    async def look(self) -> bool:
        """Look at the disk for new, changed and removed models; True when there was any."""
        changed = await self.library.refresh()
        if changed:
            self.refresh()
        return changed

    def refresh(self) -> None:
        """The library or the settings have changed: bring every host up to date, replace workers that need it."""
        known = {entry.id: entry for entry in self.library.entries}
        for entry in self.pinned():
            self.host(entry)
        for host in list(self.hosts.values()):
            if host.entry.id in known:
                self.host(known[host.entry.id])
                if host.entry.id in self._missing and host.slot.phase is Phase.REFUSED:
                    forgive(self._desk, host, time.monotonic())  # it is back, with the files it had
                rollout.begin(self._crew, self._desk, host, self.device)
            elif host.slot.phase in _PRESENT:
                # Removed on disk: it answers who is here, and goes.
                host.slot.is_pinned, host.slot.kept_since = False, None
                self._desk.unload(host.slot.model)
        self._missing = set(self.hosts) - set(known)

    def check_names(self, options: dict[str, ModelOptions]) -> None:
        """Raises `Refused` (invalid_request) where an alias is the id of another model, which it would never mean."""
        entries = self.library.entries
        ids, told = {entry.id.casefold(): entry.id for entry in entries}, Names(entries, options).options_of
        for entry in entries:
            for alias in told[entry.id].aliases:
                if (other := ids.get(alias.casefold(), entry.id)) != entry.id:
                    raise refuse(
                        ErrorCode.INVALID_REQUEST,
                        f"{alias!r} cannot be an alias of {entry.id}: it is the id of another model ({other}); "
                        "choose another",
                        param=f"models.{entry.id}.aliases",
                    )

    def check_pins(self, settings: Settings, options: dict[str, ModelOptions]) -> None:
        """Raises `Refused` (cannot_fit) with the numbers when the models pinned there are more than the budget."""
        entries = self.library.entries
        told = Names(entries, options).options_of
        pinned = {
            entry.id: bill_of(entry, self._recipe(entry, told[entry.id], settings).launch, self.device).least
            for entry in entries
            if entry.id in told and told[entry.id].pin and not entry.error
        }
        budget = settings.memory_budget_bytes or self.device.budget_bytes
        usable, limit = max(0, budget - self._desk.ledger.leaked), settings.max_resident
        if sum(pinned.values()) > usable:
            each = ", ".join(f"{model} {format_bytes(size)}" for model, size in pinned.items())
            raise refuse(
                ErrorCode.CANNOT_FIT,
                f"the pinned models need {format_bytes(sum(pinned.values()))} ({each}) and the budget is "
                f"{format_bytes(usable)}; pin fewer, or raise memory_budget_bytes",
            )
        if limit and len(pinned) > limit:
            raise refuse(
                ErrorCode.CANNOT_FIT,
                f"{len(pinned)} models are pinned and max_resident is {limit}; pin fewer",
            )
