"""What a template is made of: a plan of units, and for each unit the rows that come of it.

A unit is worked on by itself, whatever others are at the same time, and all that is random in it comes from the seed
and its number: so rows are the same in whatever order units end, and after a death only the missing ones are made.
"""

import hashlib
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

Row = dict[str, Any]
Message = dict[str, Any]
MOST_SEED = 1 << 31


class Drop(msgspec.Struct, frozen=True):
    """What did not become a row, and why."""

    where: str
    reason: str


class Made(msgspec.Struct, frozen=True):
    """What came of one unit."""

    rows: list[Row] = []
    dropped: list[Drop] = []


class Unit(NamedTuple):
    """`where`: for people, such as "line 3". `data`: what the template needs of it, as JSON has it."""

    where: str
    data: Any


class Plan(NamedTuple):
    """`dropped`: what could not become a unit. `limit`: enough rows, of the first units; 0 = all."""

    units: Sequence[Unit]
    dropped: Sequence[Drop] = ()
    limit: int = 0


class Dropped(Exception):
    """Nothing comes of this unit; the message is the reason."""


@dataclass(frozen=True)
class Answer:
    """What the model said. `calls`: tools with their arguments as JSON. `is_whole` False: it was cut at the limit."""

    text: str
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    is_whole: bool = True

    def whole(self) -> str:
        """The text. Raises `Dropped` where it is empty or cut."""
        if not self.is_whole:
            raise Dropped("the answer was cut; raise max_tokens")
        if not self.text.strip():
            raise Dropped("the answer is empty")
        return self.text.strip()


class Ask(Protocol):
    """Asks the model. Raises `Dropped` where the server refuses these messages, `Refused` where it refuses all."""

    def __call__(
        self, messages: list[Message], *, seed: int, tools: list[Any] | None = None
    ) -> Awaitable[Answer]: ...


Fetch = Callable[[str, Mapping[str, str | int]], Awaitable[Any]]
"""A path of the data set viewer and its query to JSON. Raises `Refused`."""


@dataclass
class Kit:
    """What a template works with. `fetch`: only `hf_dataset_import` needs it."""

    inputs: Mapping[str, Any]
    seed: int
    ask_model: Ask
    fetch: Fetch
    unit: int = 0
    asked: int = 0

    def of(self, unit: int) -> "Kit":
        """The kit of one unit."""
        return Kit(self.inputs, self.seed, self.ask_model, self.fetch, unit)

    def random(self) -> random.Random:
        """Numbers of this unit alone."""
        return random.Random(f"{self.seed}/{self.unit}")

    async def ask(
        self, prompt: str | list[Message], system: str = "", tools: list[Any] | None = None
    ) -> Answer:
        """Ask the model: one message of the user, or a conversation."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        self.asked += 1
        key = f"{self.seed}/{self.unit}/{self.asked}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % MOST_SEED
        return await self.ask_model(messages, seed=seed, tools=tools)


def chat(*turns: tuple[str, str], system: str = "", **more: Any) -> Row:
    """A row of the format `messages`, of (role, content)."""
    messages = [{"role": role, "content": content} for role, content in turns]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, **more}
