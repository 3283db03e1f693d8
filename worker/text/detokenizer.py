"""Token ids to text, one at a time and byte-exact: UTF-8 is held back until a character is whole.

Most tokenizers map every token to fixed bytes (byte-level BPE, SentencePiece with byte fallback), so the
text of a stream is a concatenation of bytes through an incremental UTF-8 decoder: exact, and well under a
microsecond a token. Any other decoder goes through `WindowDetokenizer`, which decodes a short window twice.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from worker.text.tokenizer import TextTokenizer


class Detokenizer(Protocol):
    """One stream of ids. `feed` gives the text that became whole; `flush` what is left at the end."""

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE (Radford et al. 2019, GPT-2's encoder)."""
    keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in keep}
    spare = (byte for byte in range(256) if byte not in set(keep))
    table.update({chr(256 + n): byte for n, byte in enumerate(spare)})
    return table


_ALPHABET = byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # an added token outside the alphabet stands for itself
        return token.encode()


def _sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()


class ByteDetokenizer:
    """For tokenizers whose tokens are fixed bytes. An invalid byte becomes U+FFFD, an incomplete tail too.

    `strip` = number of spaces taken off the very start, as SentencePiece's `Strip` decoder does.
    """

    def __init__(self, pieces: Callable[[int], bytes], strip: int = 0) -> None:
        self._pieces = pieces
        self._strip = strip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._stripped(self._decoder.decode(self._pieces(token_id)))

    def flush(self) -> str:
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        return text


class WindowDetokenizer:
    """For any decoder: the new text is what a short window of ids gives beyond what it gave before."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = ""  # text of the window that has left already

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("�") or not text.startswith(self._given):
            return ""
        new = text[len(self._given) :]
        if len(self._ids) > 16 and new:  # start a new window, with the last ids as its context
            self._ids = self._ids[-4:]
            text = self._decode(self._ids)
        self._given = text
        return new

    def flush(self) -> str:
        text = self._decode(self._ids)
        return text[len(self._given) :] if text.startswith(self._given) else ""


class DetokenizerFactory:
    """Chooses the way for one tokenizer, once; `new()` opens a stream."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.core.to_str()).get("decoder") or {}
        kind, self._strip = _kind(decoder)
        self._to_bytes = {"byte_level": _byte_level, "sentencepiece": _sentencepiece}.get(kind)
        self._pieces = _Pieces(dict.fromkeys(tokenizer.special_ids, b""), self._bytes_of)
        self._with_marks: dict[frozenset[str], _Pieces] = {}
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.core.get_added_tokens_decoder().items()
            if kind == "sentencepiece"
        }

    def new(self, marks: frozenset[str] = frozenset()) -> Detokenizer:
        """A stream. `marks`: special tokens that are text in it; the others are left out."""
        core = self._tokenizer.core
        ids = {core.token_to_id(mark): mark for mark in marks}
        seen = {i: mark for i, mark in ids.items() if i in self._tokenizer.special_ids}
        if self._to_bytes is None:
            if not seen:
                return WindowDetokenizer(lambda ids: core.decode(list(ids), skip_special_tokens=True))
            hidden = self._tokenizer.special_ids - set(seen)
            return WindowDetokenizer(
                lambda ids: core.decode([i for i in ids if i not in hidden], skip_special_tokens=False)
            )
        pieces = self._with_marks.get(marks) if seen else self._pieces
        if pieces is None:
            special = {i: seen.get(i, "").encode() for i in self._tokenizer.special_ids}
            pieces = self._with_marks[marks] = _Pieces(special, self._bytes_of)
        return ByteDetokenizer(pieces.__getitem__, self._strip)

    def spelled(self, token_id: int) -> bytes:
        """What a token stands for by itself, special ones too."""
        core = self._tokenizer.core
        token = core.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._tokenizer.special_ids:
            return token.encode()
        if self._to_bytes is None:
            return core.decode([token_id], skip_special_tokens=False).encode()
        return self._pieces[token_id]

    def _bytes_of(self, token_id: int) -> bytes:
        assert self._to_bytes is not None
        token = self._tokenizer.core.id_to_token(token_id)
        if token is None:  # padding of the vocabulary: the model may sample it, it has no text
            return b""
        return self._added.get(token_id) or self._to_bytes(token)


class _Pieces(dict[int, bytes]):
    """The bytes of each token, found when they are first asked for."""

    def __init__(self, special: dict[int, bytes], find: Callable[[int], bytes]) -> None:
        super().__init__(special)
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        piece = self[token_id] = self._find(token_id)
        return piece


def _kind(decoder: dict[str, Any]) -> tuple[str, int]:
    """-> (byte_level | sentencepiece | other, spaces stripped at the start)"""
    if decoder.get("type") == "ByteLevel":
        return "byte_level", 0
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders", [])
        kinds = [step.get("type") for step in steps]
        if kinds == ["ByteLevel"]:
            return "byte_level", 0
        replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and steps[0] == replace:
            strips = [step for step in steps[3:] if step.get("type") == "Strip"]
            if len(kinds) == 3 + len(strips) and all(
                s.get("content") == " " and not s.get("stop") for s in strips
            ):
                return "sentencepiece", sum(int(s.get("start", 0)) for s in strips)
    return "other", 0
