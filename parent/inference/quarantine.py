"""Requests that were in flight at the deaths of two workers are refused for a while. Pure: time is an argument.

The same request is known again by a hash of what the model would see; its id and a drawn seed do not count.
"""

import hashlib
from collections import OrderedDict

import msgspec

from shared import wire

DEATHS = 2
HOLD_S = 300.0
MAX_ENTRIES = 1024


def request_hash(request: wire.GenerateRequest) -> bytes:
    """16 bytes; equal for equal prompts, sampling, limits and stops."""
    seen = (request.prompt, request.sampling, request.max_tokens, request.stop)
    return hashlib.blake2b(msgspec.json.encode(seen), digest_size=16).digest()


class Quarantine:
    """Which workers died with which request. A death counts once, however many equal requests were there."""

    def __init__(self) -> None:
        self._deaths: OrderedDict[bytes, tuple[frozenset[str], float]] = OrderedDict()

    def death(self, key: bytes, worker: str, now: float) -> None:
        """`worker`, a name of no other worker, had the request when it died."""
        workers, _ = self._live(key, now)
        self._deaths[key] = (workers | {worker}, now + HOLD_S)
        self._deaths.move_to_end(key)
        if len(self._deaths) > MAX_ENTRIES:
            self._deaths.popitem(last=False)

    def survived(self, key: bytes) -> None:
        """The request was answered, or went on, after all: it was not the cause."""
        self._deaths.pop(key, None)

    def held_s(self, key: bytes, now: float) -> float:
        """Seconds for which the request is still refused; 0 = it may run."""
        workers, until = self._live(key, now)
        return until - now if len(workers) >= DEATHS else 0.0

    def _live(self, key: bytes, now: float) -> tuple[frozenset[str], float]:
        workers, until = self._deaths.get(key, (frozenset(), 0.0))
        return (workers, until) if until > now else (frozenset(), 0.0)
