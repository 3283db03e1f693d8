"""Names for blocks of a prompt: each depends on every token before, and on what computed its keys and values. Pure."""

from array import array
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from shared.kv_layout import KV_PIECE

BLOCK = KV_PIECE
"""Tokens of a block: what of a prompt is kept on disk, and found there, is a multiple of it."""


def chain(identity: str, regime: Hashable, ids: Sequence[int]) -> list[str]:
    """The name of every whole block of `ids`, in order: two prompts share names as far as they share blocks."""
    name = blake2b(f"{identity}\0{regime!r}".encode(), digest_size=16).digest()
    names = []
    for begin in range(0, len(ids) - BLOCK + 1, BLOCK):
        name = blake2b(name + array("q", ids[begin : begin + BLOCK]).tobytes(), digest_size=16).digest()
        names.append(name.hex())
    return names
