"""How many bytes of KV a row of n tokens takes, and how many tokens a number of bytes holds. Pure.

The budget (`LaunchModel.kv_bytes`) is for the KV of all active rows together. Bytes are those of the buffers, which
grow in steps, so what is promised here is never less than what a row's caches really hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shared.kv_layout import KV_STEP, LayerKv, kv_bytes, kv_room

BLOCK = KV_STEP
"""Tokens by which the promise of a growing row grows."""


@dataclass(frozen=True)
class KvBudget:
    """`limit` in bytes; 0 = none. `chunk`: tokens of a prefill chunk. Without layers everything costs nothing."""

    layers: Sequence[LayerKv] = ()
    elem_bytes: int = 0
    chunk: int = 1
    limit: int = 0

    def row_bytes(self, tokens: int) -> int:
        """Bytes of a row of up to `tokens` tokens; never less for more tokens, the same within a block."""
        return kv_room(self.layers, tokens, self.chunk, self.elem_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token costs while it is inside every window."""
        plain = max((layer.plain for layer in self.layers), default=0)
        return kv_bytes(self.layers, plain + 1, self.elem_bytes) - kv_bytes(
            self.layers, plain, self.elem_bytes
        )

    def holds(self, num_bytes: int) -> bool:
        """Whether that much may be promised."""
        return not self.limit or num_bytes <= self.limit

    def most_tokens(self, ceiling: int) -> int:
        """The longest row, at most `ceiling` tokens, that fits when it is alone; 0 = not even one token does."""
        low, high = 0, ceiling
        while low < high:
            middle = (low + high + 1) // 2
            if self.holds(self.row_bytes(middle)):
                low = middle
            else:
                high = middle - 1
        return low


def rounded(tokens: int) -> int:
    """Up to the end of the block: as many tokens as the same bytes hold."""
    return -(-tokens // BLOCK) * BLOCK
