"""Detokenizing: any ids, one at a time, give exactly what the tokenizer gives for all of them at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from worker.text.detokenizer import ByteDetokenizer, DetokenizerFactory, WindowDetokenizer
from worker.text.tokenizer import TextTokenizer

SPECIALS = ["<|end|>", "<|im_start|>"]


def byte_level() -> TextTokenizer:
    """256 bytes and two specials; one special is not ASCII, as DeepSeek's are."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(BPE({token: i for i, token in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    core.add_tokens([AddedToken("<｜tool▁call｜>", normalized=False)])
    special = {"eos_token": "<|end|>"}
    return TextTokenizer(core, {}, special, frozenset(core.token_to_id(t) for t in SPECIALS))


def sentencepiece() -> TextTokenizer:
    """Byte fallback and ▁ for the space, with the decoder of llama-2 style tokenizers."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for token in ["▁", "▁the", "a", "b", "▁東", "京", "▁▁"]:
        vocab[token] = len(vocab)
    core = Tokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return TextTokenizer(core, {}, {"eos_token": "</s>"}, frozenset({0, 1, 2}))


def word_level() -> TextTokenizer:
    """A decoder that is none of the known kinds."""
    words = ["hello", "world", "again", "##s"]
    core = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="hello"))
    core.decoder = decoders.WordPiece()
    return TextTokenizer(core, {}, {}, frozenset())


def stream(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    detokenizer = DetokenizerFactory(tokenizer).new()
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦 and 🇨🇭", "東京 タワー", "naïve café", "a\n\n  b\t", "안녕하세요 세계"]
)
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_characters_split_over_tokens_come_out_whole(make, text):
    tokenizer = make()
    ids = tokenizer.core.encode(text, add_special_tokens=False).ids
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces)


def test_text_leaves_as_soon_as_its_characters_are_whole():
    tokenizer = byte_level()
    ids = tokenizer.core.encode("aé", add_special_tokens=False).ids
    assert stream(tokenizer, ids) == ["a", "", "é", ""]


@given(st.data())
def test_any_ids_give_what_the_tokenizer_gives(data):
    tokenizer = byte_level()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(stream(tokenizer, ids)) == tokenizer.core.decode(ids, skip_special_tokens=True)


@given(st.data())
def test_sentencepiece_ids_give_what_the_tokenizer_gives_for_valid_text(data):
    tokenizer = sentencepiece()
    text = data.draw(st.text(st.characters(codec="utf-8", exclude_characters="▁"), max_size=20))
    ids = tokenizer.core.encode(text, add_special_tokens=False).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.core.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_invalid_bytes_become_replacement_characters_and_the_rest_survives(make):
    tokenizer = make()
    if make is byte_level:
        from worker.text.detokenizer import byte_level_alphabet

        stand_in = {byte: char for char, byte in byte_level_alphabet().items()}
        ids = [tokenizer.core.token_to_id(stand_in[b]) for b in b"\xf0\x9f x\xff!"]
    else:
        ids = [tokenizer.core.token_to_id(f"<0x{b:02X}>") for b in b"\xf0\x9f x\xff!"]
    text = "".join(stream(tokenizer, ids))
    assert " x" in text
    assert text.endswith("!")
    assert "�" in text


def test_an_incomplete_tail_is_one_replacement_character():
    tokenizer = byte_level()
    ids = tokenizer.core.encode("東", add_special_tokens=False).ids[:2]
    assert stream(tokenizer, ids) == ["", "", "�"]


def test_special_tokens_have_no_text_and_do_not_split_a_character():
    tokenizer = byte_level()
    first, second = tokenizer.core.encode("é", add_special_tokens=False).ids
    end = tokenizer.core.token_to_id("<|end|>")
    assert "".join(stream(tokenizer, [first, end, second])) == "é"


def test_ids_beyond_the_vocabulary_have_no_text():
    assert stream(byte_level(), [100_000]) == ["", ""]


def test_the_right_way_is_chosen_for_a_decoder():
    assert isinstance(DetokenizerFactory(byte_level()).new(), ByteDetokenizer)
    assert isinstance(DetokenizerFactory(sentencepiece()).new(), ByteDetokenizer)
    assert isinstance(DetokenizerFactory(word_level()).new(), WindowDetokenizer)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60))
def test_an_unknown_decoder_is_followed_through_a_window(ids):
    tokenizer = word_level()
    whole = tokenizer.core.decode(ids)
    assert "".join(stream(tokenizer, ids)).split() == whole.split()
