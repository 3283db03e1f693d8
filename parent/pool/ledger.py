"""Bytes: what is promised, what is measured, what did not come back. One place for models, loads and jobs. Pure.

An account is opened before its process is spawned and closed when the process has gone. It is charged with the
larger of what it was promised and what it was seen to hold. Memory that did not come back lowers the budget.
"""

from typing import Literal

import msgspec

from shared.errors import ErrorCode, Failure
from shared.units import format_bytes

Kind = Literal["model", "job"]


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What one model needs, in bytes. `kv` and `prefix` may be granted less than wished, down to the least."""

    weights: int
    transient: int = 0  # one step at its widest
    adapters: int = 0
    kv_least: int = 0  # one request of ordinary length
    kv_wish: int = 0  # all rows busy
    prefix_wish: int = 0  # prompts kept for reuse

    @property
    def fixed(self) -> int:
        return self.weights + self.transient + self.adapters

    @property
    def least(self) -> int:
        return self.fixed + self.kv_least

    @property
    def wish(self) -> int:
        return self.fixed + max(self.kv_least, self.kv_wish) + self.prefix_wish

    def grant(self, room: int) -> "Grant":
        """The parts, where `room` bytes are there: KV first, what is left for kept prompts."""
        kv = min(max(self.kv_least, self.kv_wish), max(self.kv_least, room - self.fixed))
        prefix = min(self.prefix_wish, max(0, room - self.fixed - kv))
        return Grant(self.weights, self.transient + self.adapters, kv, prefix)


class Grant(msgspec.Struct, frozen=True):
    """What a model got, by part."""

    weights: int
    transient: int
    kv: int
    prefix: int

    @property
    def total(self) -> int:
        return self.weights + self.transient + self.kv + self.prefix

    def less(self, size: int, bill: Bill) -> "Grant":
        """The same with up to `size` bytes fewer, down to the least of `bill`: kept prompts go first, then KV."""
        prefix = max(0, self.prefix - size)
        size -= self.prefix - prefix
        kv = max(min(self.kv, bill.kv_least), self.kv - max(0, size))
        return Grant(self.weights, self.transient, kv, prefix)


class Account(msgspec.Struct, kw_only=True):
    """One process's bytes."""

    kind: Kind
    reserved: int
    measured: int = 0
    grant: Grant | None = None

    @property
    def held(self) -> int:
        return max(self.reserved, self.measured)


class OverBudget(Exception):
    """A reservation that does not fit; the planner has to ask first."""


class Ledger:
    """All accounts under one budget."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.accounts: dict[str, Account] = {}
        self.missing: dict[str, int] = {}  # by account: bytes that its end did not give back

    @property
    def leaked(self) -> int:
        return sum(self.missing.values())

    @property
    def usable(self) -> int:
        """The budget without what has leaked."""
        return max(0, self.budget - self.leaked)

    @property
    def held(self) -> int:
        return sum(account.held for account in self.accounts.values())

    @property
    def reserved(self) -> int:
        return sum(account.reserved for account in self.accounts.values())

    @property
    def free(self) -> int:
        """What may still be promised; negative when processes hold more than they were promised."""
        return self.usable - self.held

    def count(self, kind: Kind) -> int:
        return sum(account.kind == kind for account in self.accounts.values())

    def held_by(self, name: str) -> int:
        account = self.accounts.get(name)
        return account.held if account else 0

    def floor_of(self, name: str, bill: Bill) -> int:
        """What an account would still be charged if it gave up all that may be taken back from it."""
        account = self.accounts.get(name)
        if account is None or account.grant is None:
            return account.held if account else 0
        return account.grant.less(account.grant.total, bill).total

    def reserve(self, name: str, size: int, kind: Kind = "model", grant: Grant | None = None) -> None:
        """Open an account before its process is started. Raises `OverBudget`."""
        if name in self.accounts:
            raise ValueError(f"{name} has an account already")
        if size > self.free:
            raise OverBudget(f"{name}: {size} bytes of {self.free} free")
        self.accounts[name] = Account(kind=kind, reserved=size, grant=grant)

    def adopt(
        self, name: str, size: int, measured: int, grant: Grant | None = None, kind: Kind = "model"
    ) -> None:
        """Open an account for a process that runs already: it is charged whether it fits or not."""
        self.accounts[name] = Account(kind=kind, reserved=size, measured=measured, grant=grant)

    def settle(self, name: str, weights: int) -> None:
        """The model is loaded: its weights are known now, the rest of the promise stands."""
        account = self.accounts.get(name)
        if account is None or account.grant is None or not weights:
            return
        account.grant = msgspec.structs.replace(account.grant, weights=weights)
        account.reserved = account.grant.total

    def resize(self, name: str, grant: Grant) -> None:
        """Another promise to a process that runs. What it holds above that is charged until it is seen to shrink."""
        account = self.accounts[name]
        account.grant, account.reserved = grant, grant.total

    def measure(self, name: str, held: int) -> None:
        """What the process was seen to hold."""
        if name in self.accounts:
            self.accounts[name].measured = held

    def release(self, name: str, missing: int = 0) -> None:
        """The process has gone; `missing` of its bytes have not come back. Twice does no harm."""
        self.accounts.pop(name, None)
        self.recover(name, missing)

    def recover(self, name: str, missing: int) -> None:
        """What of a gone process's bytes is still missing now."""
        if missing > 0:
            self.missing[name] = missing
        else:
            self.missing.pop(name, None)

    def never_fits(self, who: str, bill: Bill, pinned: int) -> Failure | None:
        """The refusal, with the numbers, where not even an otherwise empty machine would do."""
        if bill.least <= self.usable - pinned:
            return None
        return Failure(
            ErrorCode.CANNOT_FIT,
            f"{who} needs {format_bytes(bill.least)} ({self._sum(bill)}) and can have at most "
            f"{format_bytes(max(0, self.usable - pinned))}: {self._limit(pinned)}",
        )

    def _sum(self, bill: Bill) -> str:
        parts = {
            "weights": bill.weights,
            "adapters": bill.adapters,
            "one step": bill.transient,
            "KV of one request": bill.kv_least,
        }
        return " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)

    def _limit(self, pinned: int) -> str:
        limit = f"the budget is {format_bytes(self.budget)} (memory_budget_bytes)"
        if self.leaked:
            limit += f", {format_bytes(self.leaked)} of it did not come back from ended workers"
        if pinned:
            limit += f", pinned models hold {format_bytes(pinned)}"
        return limit

    def view(self) -> dict[str, object]:
        """The numbers for a person."""
        return {
            "budget_bytes": self.budget,
            "held_bytes": self.held,
            "free_bytes": self.free,
            "leaked_bytes": self.leaked,
            "leaked": dict(self.missing),
            "accounts": {
                name: {
                    "kind": account.kind,
                    "reserved_bytes": account.reserved,
                    "measured_bytes": account.measured,
                    "grant": account.grant,
                }
                for name, account in self.accounts.items()
            },
        }
