"""Requests that were in flight at the deaths of two workers are refused until somebody releases them. Pure.

The same request is known again by a hash of what the model would see; its id and a drawn seed do not count. One
death alone is forgotten after a while.
"""

import hashlib
from collections import OrderedDict

import msgspec

from shared import wire

DEATHS = 2
REMEMBER_S = 300.0
MAX_ENTRIES = 1024


def request_hash(request: wire.GenerateRequest, model: str) -> bytes:
    """16 bytes; equal for equal prompts, sampling, limits, stops and grammars, asked of one model."""
    seen = (
        model,
        request.prompt,
        request.sampling,
        request.max_tokens,
        request.stop,
        request.grammar,
        request.tool_choice,
        request.thinking_budget,
    )
    return hashlib.blake2b(msgspec.json.encode(seen), digest_size=16).digest()


class Case(msgspec.Struct, frozen=True):
    """One request and the workers that died with it."""

    workers: frozenset[str]
    model: str
    at: float  # of the last death, on the caller's clock

    @property
    def is_held(self) -> bool:
        return len(self.workers) >= DEATHS


class Quarantine:
    """Which workers died with which request. A death counts once, however many equal requests were there."""

    def __init__(self) -> None:
        self._cases: OrderedDict[bytes, Case] = OrderedDict()

    def death(self, key: bytes, worker: str, now: float, model: str = "") -> None:
        """`worker`, a name of no other worker, had the request when it died."""
        known = self._cases.get(key)
        if known is None or (not known.is_held and known.at + REMEMBER_S < now):
            known = Case(frozenset(), model, now)
        self._cases[key] = Case(known.workers | {worker}, model, now)
        self._cases.move_to_end(key)
        if len(self._cases) > MAX_ENTRIES:
            self._cases.popitem(last=False)

    def survived(self, key: bytes) -> None:
        """The request was answered, or went on, after all: it was not the cause."""
        self._cases.pop(key, None)

    def holds(self, key: bytes) -> bool:
        """Whether the request is refused."""
        case = self._cases.get(key)
        return case is not None and case.is_held

    def release(self, key: bytes) -> bool:
        """Let the request run again; False when it was not held."""
        if not self.holds(key):
            return False
        del self._cases[key]
        return True

    def held(self) -> list[tuple[bytes, Case]]:
        """What is refused, the newest last."""
        return [(key, case) for key, case in self._cases.items() if case.is_held]
