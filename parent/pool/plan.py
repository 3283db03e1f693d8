"""What should happen next: grants, loads, evictions, refusals, and when to look again. Pure.

`plan(desk, now)` decides from scratch, books what it decides in the desk, and returns it; the pool makes it so.
With nothing new it decides nothing. The rules, in this order:

1. A model that nobody uses leaves: its idle time is over, its unload was asked for, or nobody waits for its load.
2. A ready model serves its waiters, as many as its worker takes at a time, the client with least in flight first.
   It stops when another model waits for its memory and its turn is over: after `burst_requests` or `burst_s` (at
   least twice what the reload costs), once the other has waited `starve_s`, or when it has been idle for `linger_s`.
3. Models that are waited for are loaded in the order of their longest waiter. Where there is no room, the others
   give up what they were granted beyond the least (kept prompts, KV for more rows), and get it back when nobody has
   needed it for a while. Where that is not enough, idle models whose turn is over leave, least recently used first;
   never one with requests in flight, never a pinned one. A model behind another may use room that is free, until the
   one before it is starving.
4. What could not even fit in an otherwise empty machine is refused at once, with the numbers.
5. Jobs get their places in order of age, behind every model that has been waited for longer. For a job only idle models
   leave, and what models have beyond the least. With `jobs_run` idle a job begins when nobody has been answered for
   `jobs_quiet_s`; with exclusive no request is granted from its turn on until it has ended, the running ones are
   awaited. A job that can go on later makes room for a model that is starving.
"""

from typing import NamedTuple

from parent.pool.desk import FOREVER, Berth, Desk, Phase, Slot, Waiter
from parent.pool.ledger import Grant
from shared.errors import ErrorCode, Failure
from shared.units import format_bytes


class Give(NamedTuple):
    """Let this request go to its worker."""

    waiter: Waiter


class Load(NamedTuple):
    """Start a worker; its bytes are reserved."""

    model: str
    grant: Grant


class Evict(NamedTuple):
    """Let a model leave; `why` is for people."""

    model: str
    why: str


class Resize(NamedTuple):
    """Tell a ready worker that its caps are these now."""

    model: str
    grant: Grant


class Place(NamedTuple):
    """Let this job begin; its bytes are reserved."""

    job: str


class Displace(NamedTuple):
    """Ask a job to stop and go on later."""

    job: str


class Deny(NamedTuple):
    """Answer a request with this failure."""

    waiter: Waiter
    failure: Failure


Action = Give | Load | Evict | Resize | Place | Displace | Deny


class Plan(NamedTuple):
    """What to do, and when to look again if nothing happens before (FOREVER = no need)."""

    actions: list[Action]
    look_at: float


def plan(desk: Desk, now: float) -> Plan:
    """Decide, book, and say when time alone would change the decision."""
    return _Planner(desk, now).run()


def hopeless(desk: Desk, slot: Slot) -> Failure | None:
    """Why a model could not even be loaded if all that may leave had left; None where it could."""
    limit, pinned = desk.policy.max_resident, desk.pinned(but=slot.model)
    if limit and len(pinned) >= limit:
        are = "is" if len(pinned) == 1 else "are"
        said = f"{slot.model} cannot be loaded: max_resident is {limit}, and {', '.join(pinned)} {are} pinned"
        return Failure(ErrorCode.CANNOT_FIT, said)
    return desk.ledger.never_fits(slot.model, slot.bill, desk.pinned_bytes(but=slot.model))


SHRINKS_S = 3.0  # within which a worker that was told to hold less is seen to do so
GROWS_S = 60.0  # after the last shrinking


class _Planner:
    """One decision. `look_at` gathers the moments at which a rule that depends on time would say otherwise."""

    def __init__(self, desk: Desk, now: float) -> None:
        self.desk = desk
        self.ledger = desk.ledger
        self.policy = desk.policy
        self.now = now
        self.actions: list[Action] = []
        self.look_at = FOREVER
        self.contender: Slot | None = None  # the model that has waited longest for memory
        self.closed: set[str] = set()  # ready models whose turn is over and whose memory is needed

    def run(self) -> Plan:
        slots = list(self.desk.slots.values())
        for slot in slots:
            self._end_of_use(slot)
        hungry = sorted((slot for slot in slots if self._is_hungry(slot)), key=lambda slot: slot.oldest)
        hungry = [slot for slot in hungry if not self._deny_hopeless(slot)]
        self.contender = hungry[0] if hungry else None
        decided = -1
        while decided != len(self.actions):  # what somebody gave up for one may do for another before it
            decided = len(self.actions)
            waiting = [slot for slot in hungry if slot.phase is Phase.ABSENT]
            if not self.desk.closed_for:
                self._feed(waiting)
            self._place_jobs([slot for slot in waiting if slot.phase is Phase.ABSENT])
            for slot in slots:
                if slot.phase is Phase.READY and slot.model not in self.closed and not self.desk.closed_for:
                    self._serve(slot)
            self._shrink()
        jobs_wait = any(not berth.is_placed for berth in self.desk.berths.values())
        if not jobs_wait and not any(slot.phase is Phase.ABSENT for slot in hungry):
            self._grow(slots)
        return Plan(self.actions, self.look_at)

    # ------------------------------------------------------------ rule 1

    def _end_of_use(self, slot: Slot) -> None:
        if slot.granted or slot.servable or slot.is_rolling:
            return
        if slot.unload_from is not None and slot.phase in (Phase.LOADING, Phase.READY):
            self._evict(slot, "unload")
        elif slot.waiting or slot.is_pinned:
            return
        elif slot.phase is Phase.LOADING and slot.kept_since is None:
            if self._is_due(slot.empty_since + self.policy.abandon_s):
                self._evict(slot, "nobody waits for it any more")
        elif slot.phase is Phase.READY and self._is_due(
            max(slot.last_used, slot.ready_at) + slot.keep_alive_s
        ):
            self._evict(slot, f"idle for {slot.keep_alive_s:g} s")

    # ------------------------------------------------------------ rule 2

    def _serve(self, slot: Slot) -> None:
        while len(slot.granted) < slot.room and (waiter := slot.next_waiter()):
            self.desk.grant(waiter, self.now)
            self.actions.append(Give(waiter))

    def _turn_is_over(self, slot: Slot) -> bool:
        """Whether a ready model has to give way to the contender."""
        if slot.is_pinned or slot.is_rolling or self.contender is None:
            return False
        policy, waits_since = self.policy, min(self.contender.oldest, self.now)
        began = max(slot.ready_at, waits_since)
        if slot.turn_since != began:
            slot.turn_since, slot.turn_grants = began, 0
        has_served = slot.served > 0 or not slot.waiting
        if has_served and self._is_due(waits_since + policy.starve_s):
            return True
        if slot.turn_grants >= policy.burst_requests:
            return True
        burst_s = max(policy.burst_s, 2 * (slot.load_cost_s + self.contender.load_cost_s))
        if has_served and self._is_due(began + burst_s):
            return True
        if slot.granted or slot.waiting:
            return False
        return self._is_due(max(slot.idle_since + policy.linger_s, slot.ready_at + policy.min_residency_s))

    # ------------------------------------------------------------ rule 3

    def _is_hungry(self, slot: Slot) -> bool:
        wanted = slot.waiting or slot.is_pinned or slot.kept_since is not None
        return slot.phase is Phase.ABSENT and bool(wanted)

    def _feed(self, hungry: list[Slot]) -> None:
        """Load what is waited for, or make room for it. `coming`: bytes on their way back, less what they are for."""
        coming = sum(self.ledger.held_by(slot.account) for slot in self._leaving()) + self._shrinking()
        places = self._places() + len(self._leaving())
        blocked: Slot | None = None
        others = sum(slot.bill.least for slot in hungry)
        for slot in hungry:
            if blocked is not None and self._is_due(blocked.oldest + self.policy.starve_s):
                break
            need = slot.bill.least
            others -= need
            ready_now = self.ledger.free + min(0, coming)  # what is not promised to a model before
            if need <= ready_now and self._places() > 0:
                self._load(slot, ready_now, others)
                places -= 1
                continue
            coming += self._squeeze(need - (self.ledger.free + coming), self._by_last_use())
            if need <= self.ledger.free + min(0, coming) and self._places() > 0:
                self._load(slot, need, 0)
                places -= 1
                continue
            short, places_short = need - (self.ledger.free + coming), 1 - places
            victims = self._victims(short, places_short)
            if victims is None:
                blocked = blocked or slot
                continue
            for victim in victims:
                coming += self.ledger.held_by(victim.account)
                places += 1
                self._evict(victim, f"{slot.model} needs its memory")
            coming -= need
            places -= 1
        if blocked is not None and self._is_due(blocked.oldest + self.policy.starve_s):
            self._displace(blocked.bill.least - (self.ledger.free + coming))

    def _displace(self, short: int) -> None:
        """Have jobs that can go on later make room, the youngest first."""
        placed = [berth for berth in self.desk.berths.values() if berth.is_placed]
        short -= sum(self.ledger.held_by(berth.name) for berth in placed if berth.is_leaving)
        for berth in sorted(placed, key=lambda each: -each.since):
            if short > 0 and berth.may_leave and not berth.is_leaving:
                berth.is_leaving = True
                short -= self.ledger.held_by(berth.name)
                self.actions.append(Displace(berth.name))

    def _load(self, slot: Slot, ready_now: int, others: int) -> None:
        """Reserve and load. Beyond the least, one model takes half of what is left, and nothing that others need."""
        least = slot.bill.least
        extra = max(0, min((ready_now - least) // 2, ready_now - least - others))
        grant = slot.bill.grant(least + extra)
        self.ledger.reserve(slot.account, grant.total, grant=grant)
        self.desk.moved(slot.model, Phase.LOADING, self.now)
        self.actions.append(Load(slot.model, grant))

    def _squeeze(self, short: int, ready: list[Slot], *, in_part: bool = False) -> int:
        """Take back what these models have beyond the least, one after the other, if that is enough.

        Returns the bytes that will come back once the workers have let go of them.
        """
        spare = {slot.model: self._spare(slot) for slot in ready}
        if short <= 0 or (sum(spare.values()) < short and not in_part):
            return 0
        coming = self._shrinking()
        for slot in ready:
            account = self.ledger.accounts.get(slot.account)
            if short <= 0 or not spare[slot.model] or account is None or account.grant is None:
                continue
            grant = account.grant.less(short, slot.bill)
            short -= account.grant.total - grant.total
            slot.shrunk_at = self.now
            self.ledger.resize(slot.account, grant)
            self.actions.append(Resize(slot.model, grant))
        return self._shrinking() - coming

    def _spare(self, slot: Slot) -> int:
        account = self.ledger.accounts.get(slot.account)
        if account is None or account.grant is None:
            return 0
        return account.grant.total - account.grant.less(account.grant.total, slot.bill).total

    def _shrinking(self) -> int:
        """What workers that were told to hold less still hold above that; for a while they are believed to obey."""
        coming = 0
        for slot in self._by_last_use():
            account = self.ledger.accounts.get(slot.account)
            if account and account.held > account.reserved and not self._is_due(slot.shrunk_at + SHRINKS_S):
                coming += account.held - account.reserved
        return coming

    def _grow(self, slots: list[Slot]) -> None:
        """Nobody waits for memory: who was told to hold less, and longer ago, may hold more again."""
        for slot in slots:
            account = self.ledger.accounts.get(slot.account)
            if slot.phase is not Phase.READY or account is None or account.grant is None:
                continue
            if slot.shrunk_at == -FOREVER or not self._is_due(slot.shrunk_at + GROWS_S):
                continue
            slot.shrunk_at = -FOREVER
            room = account.reserved + max(0, self.ledger.free) // 2
            wish = slot.bill.grant(max(room - account.grant.weights + slot.bill.weights, slot.bill.least))
            grant = Grant(account.grant.weights, wish.transient, wish.kv, wish.prefix)
            if grant.total > account.reserved and grant.total - account.reserved <= self.ledger.free:
                self.ledger.resize(slot.account, grant)
                self.actions.append(Resize(slot.model, grant))

    def _victims(self, short: int, places_short: int) -> list[Slot] | None:
        """Who has to leave now, least recently used first; [] = enough is on its way; None = nobody can, for now.

        Where busy models stand in the way, those whose turn is over are closed: they are given nothing new.
        """
        over = {slot.model for slot in self._by_last_use() if self._turn_is_over(slot)}
        candidates = sorted(
            (slot for slot in self._by_last_use() if not (slot.is_pinned or slot.is_rolling)),
            key=lambda slot: bool(slot.granted) or slot.model not in over,
        )
        chosen: list[Slot] = []
        for slot in candidates:
            if short <= 0 and places_short <= 0:
                break
            chosen.append(slot)
            short -= self.ledger.held_by(slot.account)
            places_short -= 1
        others = [slot for slot in self._by_last_use() if slot not in chosen]
        if places_short > 0 or short > sum(map(self._spare, others)):
            return None
        self.closed |= {slot.model for slot in chosen if slot.model in over}
        if any(slot.model not in over or slot.granted for slot in chosen):
            return None
        self._squeeze(short, others)
        return chosen

    def _by_last_use(self) -> list[Slot]:
        ready = (slot for slot in self.desk.slots.values() if slot.phase is Phase.READY)
        return sorted(ready, key=lambda slot: slot.last_used)

    def _leaving(self) -> list[Slot]:
        return [slot for slot in self.desk.slots.values() if slot.phase is Phase.LEAVING]

    def _places(self) -> int:
        limit = self.policy.max_resident
        return limit - self.ledger.count("model") if limit else 1 << 30

    def _shrink(self) -> None:
        """The limits were lowered, or processes hold more than was promised: bring the books within them again."""
        coming = sum(self.ledger.held_by(slot.account) for slot in self._leaving()) + self._shrinking()
        coming += self._squeeze(-(self.ledger.free + coming), self._by_last_use(), in_part=True)
        places = self._places() + len(self._leaving())
        for slot in self._by_last_use():
            if self.ledger.free + coming >= 0 and places >= 0:
                return
            if slot.is_idle and not slot.waiting and not slot.is_pinned and not slot.is_rolling:
                coming += self.ledger.held_by(slot.account)
                places += 1
                self._evict(slot, "the models are more than the limits allow")

    # ------------------------------------------------------------ rule 4

    def _deny_hopeless(self, slot: Slot) -> bool:
        failure = hopeless(self.desk, slot)
        if failure is None:
            return False
        slot.kept_since = None
        for waiter in list(slot.waiting):
            self.desk.leave(waiter, self.now)
            self.actions.append(Deny(waiter, failure))
        return True

    # ------------------------------------------------------------ rule 5

    def _place_jobs(self, hungry: list[Slot]) -> None:
        """The jobs that may begin. One behind another waits, also where it would fit."""
        berths = sorted(self.desk.berths.values(), key=lambda each: each.since)
        for berth in (each for each in berths if not each.is_placed):
            berth.waits_for = self._hindrance(berth, hungry)
            if berth.waits_for:
                return
            berth.is_placed = True
            self.ledger.reserve(berth.name, berth.need, kind="job")
            self.actions.append(Place(berth.name))

    def _hindrance(self, berth: Berth, hungry: list[Slot]) -> str:
        """Why a job cannot begin now; "" = it can."""
        desk, policy = self.desk, self.policy
        if desk.closed_for not in ("", berth.name):
            return f"{desk.closed_for} has the machine to itself"
        older = [slot for slot in hungry if slot.oldest < berth.since]
        if older and not desk.closed_for:
            return f"{older[0].model} has been waited for longer"
        if short := self._short_for(berth):
            return short
        if policy.jobs_run == "exclusive":
            desk.closed_for = berth.name
            running = sum(len(slot.granted) for slot in desk.slots.values())
            loading = [slot.model for slot in desk.slots.values() if slot.phase is Phase.LOADING]
            if running or loading:
                return f"{running} running answers" if running else f"{loading[0]}, which is loading"
            return ""
        if desk.closed_for == berth.name:  # the setting was another one a moment ago
            desk.closed_for = ""
        if policy.jobs_run == "idle":
            if desk.is_busy:
                return "answers"
            last = max((slot.last_used for slot in desk.slots.values()), default=-FOREVER)
            if not self._is_due(last + policy.jobs_quiet_s):
                return "a quiet moment"
        return ""

    def _short_for(self, berth: Berth) -> str:
        """Make room for a job. What is still missing, in words; "" = it fits."""
        ledger = self.ledger
        if berth.need <= ledger.free:
            return ""
        said = f"memory: it needs {format_bytes(berth.need)}, {format_bytes(max(0, ledger.free))} are free"
        coming = sum(ledger.held_by(slot.account) for slot in self._leaving()) + self._shrinking()
        coming += self._squeeze(berth.need - (ledger.free + coming), self._by_last_use())
        short = berth.need - (ledger.free + coming)
        victims: list[Slot] = []
        for slot in self._by_last_use():
            if short > 0 and self._may_give_way(slot):
                victims.append(slot)
                short -= ledger.held_by(slot.account)
        if short <= 0:
            for victim in victims:
                self._evict(victim, f"{berth.name} needs its memory")
        return said

    def _may_give_way(self, slot: Slot) -> bool:
        if slot.granted or slot.waiting or slot.is_pinned or slot.is_rolling:
            return False
        policy = self.policy
        return self._is_due(max(slot.idle_since + policy.linger_s, slot.ready_at + policy.min_residency_s))

    # ------------------------------------------------------------ common

    def _evict(self, slot: Slot, why: str) -> None:
        self.desk.moved(slot.model, Phase.LEAVING, self.now)
        self.actions.append(Evict(slot.model, why))

    def _is_due(self, at: float) -> bool:
        """True when that moment has come; else it is a moment to look again."""
        if at <= self.now:
            return True
        self.look_at = min(self.look_at, at)
        return False
