"""The model's tokenizer: load, encode, special ids, and what each id means in bytes.

Built on `tokenizers` and the files of a model directory (`tokenizer.json`, `tokenizer_config.json`,
`special_tokens_map.json`); Hugging Face transformers is not needed.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from shared.errors import ErrorCode, refuse
from shared.files import decode_json

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TextTokenizer:
    """A loaded tokenizer.

    `special` maps a name (`bos_token`, …) to its text; `special_ids` are the ids left out of decoded text;
    `config` is `tokenizer_config.json`, or empty.
    """

    core: Tokenizer
    config: dict[str, Any]
    special: dict[str, str]
    special_ids: frozenset[int]

    @property
    def bos_id(self) -> int | None:
        text = self.special.get("bos_token")
        return None if text is None else self.core.token_to_id(text)

    @property
    def eos_id(self) -> int | None:
        text = self.special.get("eos_token")
        return None if text is None else self.core.token_to_id(text)

    @property
    def vocab_size(self) -> int:
        return self.core.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text than this."""
        return max((len(token.encode()) for token in self.core.get_vocab()), default=1)

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered template: the template itself writes BOS and the like, so nothing is added."""
        return self._encode(text, add_special_tokens=False)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with what the tokenizer adds; a BOS written in the text is not doubled."""
        ids = self._encode(text, add_special_tokens=True)
        bos = self.bos_id
        if bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Through the batch call, which lets other threads run meanwhile; the plain one does not."""
        [encoding] = self.core.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)


def load_tokenizer(path: Path) -> TextTokenizer:
    """Read the tokenizer of a model directory. Raises `Refused` (bad_checkpoint) in one line."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{path} has no tokenizer.json; the model cannot read text")
    try:
        core = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{file} cannot be read: {_one_line(error)}") from error
    config = _read_json(path / "tokenizer_config.json")
    special = _special_texts(config, _read_json(path / "special_tokens_map.json"))
    _add_missing(core, config)
    special_ids = {token_id for token_id, token in core.get_added_tokens_decoder().items() if token.special}
    special_ids |= {i for text in special.values() if (i := core.token_to_id(text)) is not None}
    core.no_truncation()
    core.no_padding()
    return TextTokenizer(core, config, special, frozenset(special_ids))


def _special_texts(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """Names to texts; a token is written as a string or as `{"content": …}`."""
    found: dict[str, str] = {}
    for source in (special_map, config):  # the configuration wins
        for name in _NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _add_missing(core: Tokenizer, config: dict[str, Any]) -> None:
    """Some exports name added tokens only in `added_tokens_decoder`; their ids must come out as written."""
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return
    numbered = sorted((int(key), value) for key, value in entries.items() if isinstance(value, dict))
    for token_id, value in numbered:
        text = value.get("content")
        if not isinstance(text, str) or core.token_to_id(text) is not None:
            continue
        if token_id != core.get_vocab_size(with_added_tokens=True):
            continue  # it would get another id than the model was trained with
        flags = {k: bool(value.get(k)) for k in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(text, special=bool(value.get("special")), **flags)
        (core.add_special_tokens if value.get("special") else core.add_tokens)([token])


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`; empty when there is none. Raises `Refused` when it is not a JSON object."""
    if not file.is_file():
        return {}
    try:
        value = decode_json(file.read_bytes())
    except ValueError as error:
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{file} is not JSON: {_one_line(error)}") from error
    if not isinstance(value, dict):
        raise refuse(ErrorCode.BAD_CHECKPOINT, f"{file} holds no JSON object")
    return value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
