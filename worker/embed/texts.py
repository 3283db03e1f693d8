"""Texts to ids, with what the tokenizer adds; cut, or refused, where the model cannot read all of it. Slow: a thread.

The ends that a tokenizer puts around a text ([CLS], [SEP], an end of text) stay when the text is cut.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from shared.errors import ErrorCode, Failure, Refused, refuse


class Ids(NamedTuple):
    """What a model reads of a text. `types`: 1 for tokens of the second text of a pair."""

    ids: list[int]
    types: list[int]


def encode(
    core: Tokenizer, texts: Sequence[str], *, most: int, cut_at: int, places: Sequence[int]
) -> list[Ids]:
    """Raises `Refused` for a text of more than `most` tokens, unless `cut_at` (tokens; 0 = not at all) cuts it.

    `places`: of the texts among the inputs, for what is said of them.
    """
    ends = core.num_special_tokens_to_add(False)
    found = []
    for place, encoding in zip(places, _plain(core, texts), strict=True):
        if not cut_at:
            check_length(len(encoding) + ends, most, place)
        elif len(encoding) + ends > cut_at:
            encoding.truncate(max(0, cut_at - ends))
        found.append(_ids(core.post_process(encoding, None, True)))
        if not found[-1].ids:
            raise refuse(ErrorCode.INVALID_REQUEST, f"input[{place}] has no tokens", param="input")
    return found


def encode_pairs(core: Tokenizer, query: str, documents: Sequence[str], *, most: int) -> list[Ids]:
    """The query before each document, `most` tokens at most: the query has half of them where it is longer than that,
    the document what is left.
    """
    room = max(2, most - core.num_special_tokens_to_add(True))
    [first] = _plain(core, [query])
    if len(first) > room // 2:
        first.truncate(room // 2)
    found = []
    for encoding in _plain(core, documents):
        if len(encoding) > room - len(first):
            encoding.truncate(room - len(first))
        found.append(_ids(core.post_process(first, encoding, True)))
    return found


def check_length(tokens: int, most: int, place: int) -> None:
    """Raises `Refused` (context_exceeded) with the numbers."""
    if tokens > most:
        raise Refused(
            Failure(
                ErrorCode.CONTEXT_EXCEEDED,
                f"input[{place}] has {tokens} tokens and this model reads {most}; shorten it by at least "
                f"{tokens - most} tokens, or send truncate_prompt_tokens -1 to have it cut",
                "input",
                tokens=tokens,
                most_tokens=most,
            )
        )


def _plain(core: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    return list(core.encode_batch_fast(list(texts), add_special_tokens=False))


def _ids(encoding: Encoding) -> Ids:
    return Ids(list(encoding.ids), list(encoding.type_ids))
