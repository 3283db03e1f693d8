"""Vectors and scores of the fake worker: each from its text alone, so that a test knows them."""

import hashlib
from array import array

import msgspec

from shared import wire

DIMENSIONS = 4
_decode_embed = msgspec.json.Decoder(wire.EmbedRequest).decode
_decode_rank = msgspec.json.Decoder(wire.RankRequest).decode


def vector_of(text: str) -> list[float]:
    """Of length 1, and exact in 32 bits."""
    place = hashlib.blake2b(text.encode(), digest_size=1).digest()[0] % DIMENSIONS
    return [1.0 if at == place else 0.0 for at in range(DIMENSIONS)]


def score_of(query: str, document: str) -> float:
    """Of a document."""
    return hashlib.blake2b(f"{query}|{document}".encode(), digest_size=1).digest()[0] / 256


def answer(path: str, body: bytes) -> wire.EmbedResult | wire.RankResult:
    """What `/embed` and `/rank` say."""
    if path == "/rank":
        asked = _decode_rank(body)
        scores = [score_of(asked.query, document) for document in asked.documents]
        return wire.RankResult(scores, sum(len(each.split()) for each in (asked.query, *asked.documents)))
    texts = [
        each.text if isinstance(each, wire.TextPrompt) else " ".join(map(str, each.ids))
        for each in _decode_embed(body).inputs
    ]
    vectors = array("f", [value for text in texts for value in vector_of(text)])
    return wire.EmbedResult(vectors.tobytes(), DIMENSIONS, sum(len(text.split()) for text in texts))
