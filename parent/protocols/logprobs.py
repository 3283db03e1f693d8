"""Log-probabilities of tokens as OpenAI's formats show them. Pure.

A token whose bytes are not whole characters is shown with U+FFFD; its `bytes` are exact.
"""

import codecs
from collections.abc import Sequence

import msgspec

from shared import wire

LEAST = -9999.0  # JSON has no infinity


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


def entries(logprobs: Sequence[wire.Logprob]) -> list[TokenLogprob]:
    """One entry a token, as chats have them."""
    return [
        TokenLogprob(
            text_of(each.bytes),
            _finite(each.logprob),
            list(each.bytes),
            [TopLogprob(text_of(top.bytes), _finite(top.logprob), list(top.bytes)) for top in each.top],
        )
        for each in logprobs
    ]


def text_of(spelled: bytes) -> str:
    """A token as text."""
    return spelled.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


class TextLogprobs(msgspec.Struct, frozen=True):
    """As text completions have them: lists of one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextLogprobsWriter:
    """Knows how far the text is. A character counts with the token that completes it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, logprobs: list[wire.Logprob]) -> TextLogprobs:
        """The next tokens."""
        offsets = []
        for each in logprobs:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(each.bytes))
        return TextLogprobs(
            [text_of(each.bytes) for each in logprobs],
            [_finite(each.logprob) for each in logprobs],
            [_top(each) for each in logprobs],
            offsets,
        )


def _top(logprob: wire.Logprob) -> dict[str, float]:
    """The likeliest tokens and the drawn one; of those that look alike the likeliest."""
    found: dict[str, float] = {}
    for each in logprob.top:
        found.setdefault(text_of(each.bytes), _finite(each.logprob))
    found.setdefault(text_of(logprob.bytes), _finite(logprob.logprob))
    return found
