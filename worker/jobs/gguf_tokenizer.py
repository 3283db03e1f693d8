"""The tokenizer of a GGUF file as Hugging Face files: tokenizer.json, tokenizer_config.json, chat template.

Two models: byte-level BPE (`gpt2`, with the pre-tokenizers of `PRE_TOKENIZERS`) and SentencePiece BPE
(`llama`), whose merges follow from the scores. Others are refused by name: a wrong split makes a model subtly
worse, and nobody sees why. Split patterns: those of the models' own tokenizer.json files.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from worker.jobs.gguf import GgufError, Unsupported

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""`tokenizer.ggml.token_type`."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    rf"|\p{{N}}{{1,3}}{_REST}"
)
_TEKKEN = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*patterns: str) -> Any:
    """Cut by each pattern in turn, then map bytes to letters."""
    cuts: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _smollm() -> Any:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])


PRE_TOKENIZERS: Mapping[str, Callable[[], Any]] = {
    "smollm": _smollm,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "llama-bpe": lambda: _byte_level(_LLAMA3),
    "qwen2": lambda: _byte_level(_QWEN2),
    "gpt-4o": lambda: _byte_level(_GPT4O),
    "glm4": lambda: _byte_level(_LLAMA3),
    "tekken": lambda: _byte_level(_TEKKEN),
    "deepseek-v3": lambda: _byte_level(r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK),
    # what llama.cpp does with files from before pre-tokenizers had names
    "default": lambda: _byte_level(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "chatglm-bpe": "glm4"}


class Vocabulary:
    """The token table of a GGUF file, checked."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.tokens = self._list("tokens", str)
        self.kinds = self._list("token_type", int) if self._has("token_type") else [NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise GgufError(f"{len(self.tokens)} tokens but {len(self.kinds)} token types")
        if len(set(self.tokens)) != len(self.tokens):
            raise GgufError("the same token text comes twice in tokenizer.ggml.tokens")

    def _has(self, key: str) -> bool:
        return f"tokenizer.ggml.{key}" in self.metadata

    def _list(self, key: str, kind: type) -> list[Any]:
        found = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            raise GgufError(f"metadata tokenizer.ggml.{key} is missing or of the wrong type")
        return found

    def merges(self) -> list[tuple[str, str]]:
        """The merge rules in order."""
        pairs = [tuple(rule.split(" ")) for rule in self._list("merges", str)]
        wrong = next((pair for pair in pairs if len(pair) != 2), None)
        if wrong is not None:
            raise GgufError(f"merge rule {' '.join(wrong)!r} is not a pair")
        return pairs

    def scores(self) -> list[float]:
        """One a token."""
        found = self._list("scores", float)
        if len(found) != len(self.tokens):
            raise GgufError(f"{len(self.tokens)} tokens but {len(found)} scores")
        return found

    def flag(self, key: str, default: bool) -> bool:
        """A boolean setting."""
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))

    def special(self, key: str) -> str | None:
        """Text of the token that `tokenizer.ggml.<key>_token_id` names."""
        number = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if number is None or number == 0xFFFFFFFF:
            return None
        if not isinstance(number, int) or not 0 <= number < len(self.tokens):
            raise GgufError(f"metadata tokenizer.ggml.{key}_token_id is {number!r}, not a token")
        text: str = self.tokens[number]
        return text

    def of_kind(self, kind: int) -> list[str]:
        """Texts of all tokens of one type."""
        return [token for token, each in zip(self.tokens, self.kinds, strict=True) if each == kind]


def eos_ids(metadata: Mapping[str, Any]) -> list[int]:
    """Every token that ends an answer: end of sequence, of turn, of message."""
    keys = ("eos", "eot", "eom")
    found = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    return sorted({one for one in found if isinstance(one, int) and one != 0xFFFFFFFF})


def build(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """The tokenizer and whether it adds the BOS token. Raises `GgufError` for a kind not known."""
    vocabulary = Vocabulary(metadata)
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, add_bos = _bpe(vocabulary)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(vocabulary)
    else:
        raise Unsupported(f"tokenizer {model!r} cannot be converted; gpt2 and llama can")
    specials = vocabulary.of_kind(CONTROL)
    if model == "llama":
        specials += vocabulary.of_kind(UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in specials])
    tokenizer.add_tokens([AddedToken(one, normalized=False) for one in vocabulary.of_kind(USER_DEFINED)])
    add_bos = vocabulary.flag("add_bos_token", add_bos)
    bos = vocabulary.special("bos")
    if add_bos and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    if tokenizer.get_vocab_size() != len(vocabulary.tokens):
        raise GgufError("the tokenizer would have other ids than the file")
    return tokenizer, add_bos and bos is not None


def _bpe(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    name = _ALIASES.get(name, name)
    if name not in PRE_TOKENIZERS:
        raise Unsupported(
            f"pre-tokenizer {name!r} cannot be converted; known are {', '.join(PRE_TOKENIZERS)}"
        )
    llama3 = name in ("llama-bpe", "tekken")
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        tokenizer = Tokenizer(BPE(ids, vocabulary.merges(), ignore_merges=llama3))
    except Exception as error:  # tokenizers raises plain Exception
        raise GgufError(f"the merge rules do not fit the tokens ({error})") from None
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, llama3


def _sentencepiece(vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """SentencePiece joins the neighbours whose joint piece has the best score: merges in order of score."""
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    mergeable = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, vocabulary.scores(), vocabulary.kinds, strict=True)
        if kind == NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-score, ids[left], ids[right], left, right))
    ranked.sort()
    tokenizer = Tokenizer(
        BPE(
            ids,
            [(left, right) for *_, left, right in ranked],
            unk_token=vocabulary.special("unknown") or next(iter(vocabulary.of_kind(UNKNOWN)), None),
            fuse_unk=True,
            byte_fallback=bool(vocabulary.of_kind(BYTE)),
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    back: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer, True


def write(metadata: Mapping[str, Any], folder: Path, context: int) -> None:
    """Write the tokenizer's files into `folder`. Raises `GgufError`."""
    tokenizer, add_bos = build(metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    vocabulary = Vocabulary(metadata)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    specials = {key: text for key, name in names.items() if (text := vocabulary.special(name)) is not None}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        **specials,
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    _dump(folder / "tokenizer_config.json", config)
    _dump(folder / "special_tokens_map.json", specials)


def _dump(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
