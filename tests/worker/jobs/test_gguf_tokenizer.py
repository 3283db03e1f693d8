"""Tokenizers out of GGUF metadata: they split and merge as the originals do."""

import heapq
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.oracles import checkpoints
from tests.worker.jobs.gguf_files import tokenizer_metadata
from worker.jobs.gguf import GgufError
from worker.jobs.gguf_tokenizer import PRE_TOKENIZERS, build, eos_ids, write

TEXTS = st.lists(
    st.sampled_from([*"the andin ou1234é中🙂.,'s\n\t", "<|im_end|>", "<think>"]), max_size=30
).map("".join)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    checkpoints.write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@given(text=TEXTS)
@settings(deadline=None)
def test_byte_level_ids_are_those_of_the_original_and_decode_back(text: str, original: Tokenizer) -> None:
    tokenizer, _ = build(tokenizer_metadata())
    ids = tokenizer.encode(text).ids
    assert ids == original.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def words(name: str, text: str) -> list[str]:
    """What a pre-tokenizer cuts `text` into."""
    return [text[begin:end] for _, (begin, end) in PRE_TOKENIZERS[name]().pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("gpt-2", "We've 12345 cats", ["We", "'ve", " 12345", " cats"]),
        ("gpt-2", "WE'VE", ["WE", "'", "VE"]),
        ("smollm", "We've 12345 cats", ["We", "'ve", " ", "1", "2", "3", "4", "5", " cats"]),
        ("llama-bpe", "WE'VE 12345 cats", ["WE", "'VE", " ", "123", "45", " cats"]),
        ("llama-bpe", "a\n\n  b!?\n", ["a", "\n\n", " ", " b", "!?\n"]),
        ("qwen2", "We've 123 (cats)", ["We", "'ve", " ", "1", "2", "3", " (", "cats", ")"]),
        ("gpt-4o", "WORLD's heLLo 12345 a/b", ["WORLD's", " he", "LLo", " ", "123", "45", " a", "/b"]),
        ("glm4", "WORLD's 12345 a/b", ["WORLD", "'s", " ", "123", "45", " a", "/b"]),
        ("tekken", "WORLD's heLLo 123", ["WORLD", "'s", " he", "LLo", " ", "1", "2", "3"]),
        ("deepseek-v3", "x 1234  日本語です", ["x", " ", "123", "4", "  ", "日本語です"]),
        ("default", "a+b 12345", ["a", "+", "b", " ", "123", "45"]),
    ],
)
def test_pre_tokenizers_cut_where_the_models_were_trained_to(
    name: str, text: str, expected: list[str]
) -> None:
    assert words(name, text) == expected


def test_llama3_takes_a_whole_word_that_is_a_token_without_merging() -> None:
    metadata = tokenizer_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*checkpoints.tokens(), "zyx"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert build(metadata)[0].encode("zyx", add_special_tokens=False).tokens == ["zyx"]
    assert build({**metadata, "tokenizer.ggml.pre": "gpt-2"})[0].encode("zyx").tokens == ["z", "y", "x"]


@pytest.mark.parametrize(
    ("pre", "more", "adds"),
    [
        ("gpt-2", {}, False),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, True),
        ("llama-bpe", {}, True),
        ("llama3", {}, True),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_the_bos_token_is_added_where_the_model_wants_it(pre: str, more: dict[str, Any], adds: bool) -> None:
    tokenizer, add_bos = build(tokenizer_metadata(pre, **more))
    assert add_bos == adds
    assert tokenizer.encode("a").ids[:-1] == ([1] if adds else [])
    assert len(tokenizer.encode("a", add_special_tokens=False).ids) == 1


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    metadata = tokenizer_metadata()
    metadata["tokenizer.ggml.token_type"][3] = 4  # <think>
    tokenizer, _ = build(metadata)
    ids = tokenizer.encode("a<think>b<|im_end|>").ids
    assert [one for one in ids if one < len(checkpoints.SPECIALS)] == [3, 2]
    assert tokenizer.decode(ids) == "a<think>b"


# ---------------------------------------------------------------- SentencePiece

PIECES = ["▁", "a", "b", "c", "▁a", "ab", "bc", "abc", "▁abc", "aa", "aaaa", "ca", "▁c"]


def sentencepiece(scores: list[float], **more: Any) -> dict[str, Any]:
    """A SentencePiece model: unknown, BOS, EOS, 256 bytes, then `PIECES`."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [2, 3, 3] + [6] * 256 + [1] * len(PIECES)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def by_definition(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece BPE: join the best-scored pair of neighbours, leftmost first, until none is left."""
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (-scores[left + right], i)
            for i, (left, right) in enumerate(pairwise(symbols))
            if left + right in scores and left in scores and right in scores
        ]
        if not pairs:
            break
        _, i = heapq.nsmallest(1, pairs)[0]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    out: list[str] = []
    for symbol in symbols:
        out += [symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return out


@given(
    order=st.permutations(range(len(PIECES))),
    text=st.text(alphabet="abc é中", max_size=20),
)
@settings(deadline=None, max_examples=200)
def test_sentencepiece_ids_follow_from_the_scores(order: list[int], text: str) -> None:
    scores = [-float(place) for place in order]
    tokenizer, add_bos = build(sentencepiece(scores))
    encoded = tokenizer.encode(text)
    assert add_bos
    assert encoded.tokens == ["<s>", *by_definition(text, dict(zip(PIECES, scores, strict=True)))]
    assert tokenizer.decode(encoded.ids) == text


def test_sentencepiece_without_a_space_in_front() -> None:
    scores = [-float(place) for place in range(len(PIECES))]
    tokenizer, _ = build(
        sentencepiece(
            scores, **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
        )
    )
    assert tokenizer.encode("abc").tokens == ["abc"]
    assert tokenizer.decode(tokenizer.encode(" abc").ids) == " abc"


# ---------------------------------------------------------------- files and faults


def test_the_files_name_the_special_tokens_and_the_template(tmp_path: Path) -> None:

    write(tokenizer_metadata(), tmp_path, 512)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert (config["add_bos_token"], config["model_max_length"]) == (False, 512)
    assert (tmp_path / "chat_template.jinja").read_text() == checkpoints.CHAT_TEMPLATE
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|im_end|>") == 2


def test_every_token_that_ends_an_answer_is_found() -> None:
    metadata = {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    assert eos_ids(metadata) == [2, 7]
    assert eos_ids({"tokenizer.ggml.eos_token_id": 0xFFFFFFFF}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer 't5'"),
        ({"tokenizer.ggml.pre": "poro"}, "pre-tokenizer 'poro'"),
        ({"tokenizer.ggml.token_type": [1]}, "272 tokens but 1 token types"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "merge rule 'a b c' is not a pair"),
        ({"tokenizer.ggml.bos_token_id": 10**6}, "bos_token_id is 1000000, not a token"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.5]}, "272 tokens but 1 scores"),
    ],
)
def test_faults_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GgufError, match=message):
        build(tokenizer_metadata() | changes)
