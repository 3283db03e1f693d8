"""The books of the pool: which models there are, who waits, who is served, and since when. Pure.

`Desk` only records; `parent/pool/plan.py` decides what should happen and the pool makes it so. Time is an argument.
"""

from enum import StrEnum
from itertools import count

import msgspec

from parent.pool.ledger import Bill, Ledger

FOREVER = float("inf")
BEFORE_ALL = 1 << 60


class Phase(StrEnum):
    """What a model's worker means to the planner; table W has the fine print."""

    ABSENT = "absent"
    LOADING = "loading"  # wanted and not ready: spawning, loading, or coming back from a crash
    READY = "ready"
    LEAVING = "leaving"  # unwanted and not gone: draining, stopping, its memory not measured back
    REFUSED = "refused"  # a permanent fault, or the restart budget is spent


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of the planner; settings of the same names."""

    max_resident: int = 0
    burst_requests: int = 16
    burst_s: float = 10.0
    linger_s: float = 0.25
    min_residency_s: float = 1.0
    starve_s: float = 60.0
    abandon_s: float = 5.0
    jobs_run: str = "beside"
    jobs_quiet_s: float = 2.0


class Waiter:
    """One request that wants a model, from its arrival to its release."""

    def __init__(self, number: int, model: str, client: str, since: float) -> None:
        self.key = self.number = (
            number  # the number is also the place in the queue: it falls when a worker is lost
        )
        self.model = model
        self.client = client
        self.since = since
        self.is_granted = False
        self.is_suspect = False  # it was running when its worker died, and has got no further since


class Slot:
    """One model in the books."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.account = model  # its name in the ledger
        self.phase = Phase.ABSENT
        self.bill = Bill(weights=0)
        self.room = 1  # requests its worker takes at a time
        self.waiting: list[Waiter] = []  # in order of arrival
        self.granted: set[Waiter] = set()
        self.is_pinned = False
        self.kept_since: float | None = None  # loaded on somebody's word: not abandoned for want of waiters
        self.is_rolling = False  # a successor is being brought up: not to be evicted
        self.unload_from: int | None = (
            None  # an operator's: leave once all requests before this number are answered
        )
        self.keep_alive_s = FOREVER
        self.load_cost_s = 0.0  # learned: from spawn to ready, and from drain to gone
        self.ready_at = 0.0
        self.idle_since = 0.0
        self.empty_since = 0.0  # since when nobody waits or is served
        self.last_used = 0.0
        self.turn_since = 0.0  # since when its grants are counted against another's wait
        self.turn_grants = 0
        self.served = 0  # grants since it became ready
        self.shrunk_at = -FOREVER  # when it was last told to hold less

    @property
    def is_idle(self) -> bool:
        return self.phase is Phase.READY and not self.granted

    @property
    def oldest(self) -> float:
        """Since when it is waited for; FOREVER when it is not."""
        kept = FOREVER if self.kept_since is None else self.kept_since
        return min((waiter.since for waiter in self.waiting), default=kept)

    @property
    def servable(self) -> list[Waiter]:
        """Who may be granted: while an unload is under way only those who came before it."""
        if self.unload_from is None:
            return self.waiting
        return [waiter for waiter in self.waiting if waiter.number < self.unload_from]

    def next_waiter(self) -> Waiter | None:
        """Who lost a worker first; then fair by client: who has least in flight here, then who came first.

        Of suspects only one runs at a time, so that the next death shows whose fault it is.
        """
        busy: dict[str, int] = {}
        for each in self.granted:
            busy[each.client] = busy.get(each.client, 0) + 1
        on_trial = any(each.is_suspect for each in self.granted)
        return min(
            (each for each in self.servable if not (on_trial and each.is_suspect)),
            key=lambda each: (each.number >= 0, busy.get(each.client, 0), each.number),
            default=None,
        )


class Berth:
    """A job's place in memory, from asking for it to giving it up. `may_leave`: it can go on later, so that it may be
    asked to make room.
    """

    def __init__(self, name: str, need: int, since: float, *, may_leave: bool) -> None:
        self.name = name
        self.need = need
        self.since = since
        self.may_leave = may_leave
        self.is_placed = False
        self.is_leaving = False
        self.waits_for = ""  # why it is not placed, for people


class Desk:
    """All slots, the berths of jobs, and the ledger."""

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        self.ledger = ledger
        self.policy = policy
        self.slots: dict[str, Slot] = {}
        self.berths: dict[str, Berth] = {}
        self.closed_for = ""  # the job that has, or is about to have, the machine to itself
        self._numbers = count(1)

    def slot(self, model: str) -> Slot:
        """The slot of a model; opened on first use."""
        if model not in self.slots:
            self.slots[model] = Slot(model)
        return self.slots[model]

    @property
    def num_waiting(self) -> int:
        return sum(len(slot.waiting) for slot in self.slots.values())

    def has_waiting(self, client: str) -> bool:
        """Whether a request of this client waits, for whatever model."""
        return any(waiter.client == client for slot in self.slots.values() for waiter in slot.waiting)

    def pinned(self, but: str = "") -> list[str]:
        """The pinned models, `but` left out."""
        return [slot.model for slot in self.slots.values() if slot.is_pinned and slot.model != but]

    def pinned_bytes(self, but: str = "") -> int:
        """What pinned models hold or will hold at the least, that of `but` left out."""
        slots = [self.slots[model] for model in self.pinned(but)]
        return sum(max(slot.bill.least, self.ledger.floor_of(slot.account, slot.bill)) for slot in slots)

    # ------------------------------------------------------------ requests

    def ask(self, model: str, client: str, now: float) -> Waiter:
        """A request wants this model."""
        slot = self.slot(model)
        waiter = Waiter(next(self._numbers), model, client, now)
        slot.waiting.append(waiter)
        slot.last_used = now
        return waiter

    def grant(self, waiter: Waiter, now: float) -> None:
        slot = self.slots[waiter.model]
        slot.waiting.remove(waiter)
        slot.granted.add(waiter)
        waiter.is_granted = True
        slot.served += 1
        slot.turn_grants += 1
        slot.last_used = now

    def leave(self, waiter: Waiter, now: float) -> None:
        """The request has ended, or its client has gone; twice does no harm."""
        slot = self.slots[waiter.model]
        if waiter in slot.granted:
            slot.granted.remove(waiter)
            slot.last_used = now
        elif waiter in slot.waiting:
            slot.waiting.remove(waiter)
        if not slot.granted:
            slot.idle_since = now
            if not slot.waiting:
                slot.empty_since = now

    def requeue(self, waiter: Waiter, now: float, *, suspect: bool = True) -> None:
        """A granted request has lost its worker: it waits again, before all others, without a gap in between."""
        slot = self.slots[waiter.model]
        slot.granted.discard(waiter)
        waiter.is_granted, waiter.is_suspect = False, suspect
        waiter.number = waiter.key - BEFORE_ALL  # among those who lost one too: who came first
        waiter.since = now
        slot.waiting.append(waiter)
        slot.waiting.sort(key=lambda each: each.number)

    def cleared(self, waiter: Waiter) -> None:
        """It has got further than at its last loss: it is suspected no more."""
        waiter.is_suspect = False

    def unload(self, model: str) -> None:
        """Let the model leave once the requests that are here now are answered."""
        self.slot(model).unload_from = next(self._numbers)

    @property
    def is_busy(self) -> bool:
        """Somebody is answered, or waits to be."""
        return any(
            slot.granted or slot.waiting or slot.phase is Phase.LOADING for slot in self.slots.values()
        )

    # ------------------------------------------------------------ workers

    def moved(self, model: str, phase: Phase, now: float) -> None:
        """The phase of a model's worker is this now."""
        slot = self.slot(model)
        before, slot.phase = slot.phase, phase
        if phase is before:
            return
        if phase is Phase.READY:
            slot.ready_at = slot.idle_since = slot.turn_since = now
            slot.turn_grants = slot.served = 0
            slot.last_used = max(slot.last_used, now)
        elif phase is Phase.LOADING:
            slot.empty_since = now
        elif phase is Phase.LEAVING:
            slot.kept_since = slot.unload_from = None

    def learn(self, model: str, cost_s: float) -> None:
        """How long a load took; the newest counts as much as all before."""
        slot = self.slot(model)
        slot.load_cost_s = cost_s if not slot.load_cost_s else (slot.load_cost_s + cost_s) / 2
