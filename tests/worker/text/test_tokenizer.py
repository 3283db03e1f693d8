"""The tokenizer of a model directory: special tokens, added tokens, BOS, and refusals."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from shared.errors import ErrorCode, Refused
from tests.oracles.checkpoints import write_tokenizer
from worker.text.detokenizer import DetokenizerFactory
from worker.text.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    return tmp_path


def edit(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_special_tokens_are_read_in_either_spelling(folder):
    assert load_tokenizer(folder).eos_id == 2
    edit(folder, eos_token={"content": "<|endoftext|>", "special": True})
    assert load_tokenizer(folder).eos_id == 0


def test_special_tokens_may_come_from_the_map_file(folder):
    edit(folder, eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load_tokenizer(folder).eos_id == 2


def test_a_rendered_prompt_gets_nothing_added_and_plain_text_gets_one_bos(folder):
    core = Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.post_processor = processors.TemplateProcessing(
        "<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    core.save(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(folder)
    plain = tokenizer.encode_text("hi")
    assert plain[0] == 1
    assert tokenizer.encode_text("<|im_start|>hi") == plain
    assert tokenizer.encode_rendered("hi") == plain[1:]
    assert tokenizer.encode_rendered("<|im_start|>hi") == plain


def test_added_tokens_named_only_in_the_configuration_get_their_ids(folder):
    size = load_tokenizer(folder).vocab_size
    edit(folder, added_tokens_decoder={str(size): {"content": "<|new|>", "special": True}})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode_rendered("<|new|>") == [size]
    assert size in tokenizer.special_ids


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json holds no JSON object"),
    ],
)
def test_a_broken_tokenizer_is_refused_by_its_file(folder, file, content, words):
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_text(content)
    with pytest.raises(Refused, match=words) as caught:
        load_tokenizer(folder)
    assert caught.value.failure.code is ErrorCode.BAD_CHECKPOINT
    assert "\n" not in caught.value.failure.message


SAMPLES = [
    "",
    "\x00",
    "a\x00b",
    "👩‍👩‍👧‍👦🇨🇭",
    "שלום עולם",
    "مرحبا",
    "東京 は",
    "e\u0301é",
    "\u202e\ufeff\uffff",
    " \t\n  x  ",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_tokenize_and_detokenize_keep_every_text(tokenizer, text):
    assert spelled(tokenizer, text) == text


@given(st.text(max_size=60))
def test_tokenize_and_detokenize_keep_any_unicode(tokenizer, text):
    assert spelled(tokenizer, text) == text


@given(st.lists(st.integers(0, 400), max_size=20))
def test_detokenize_pieces_of_any_ids_are_the_bytes_of_their_text(tokenizer, ids):
    pieces = b"".join(map(DetokenizerFactory(tokenizer).spelled, ids))
    assert pieces.decode(errors="replace") == tokenizer.core.decode(ids, skip_special_tokens=False)


def spelled(tokenizer, text):
    return tokenizer.core.decode(tokenizer.encode_text(text), skip_special_tokens=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)
