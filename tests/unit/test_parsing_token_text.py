"""Characters and their tokens, where tokens end inside characters."""

import pytest
from tokenizers import Tokenizer as Engine
from tokenizers import decoders, models, pre_tokenizers

from mmrender.model.spelling import TokenSpeller, TokenText, _byte_fallback
from mmrender.model.tokenizer import Tokenizer
from parsing_cases import byte_level, sentence_piece


def text_of(tokenizer: Tokenizer, ids: list[int]) -> TokenText:
    return TokenText(ids, TokenSpeller(tokenizer))


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("text", ["", "a too  a</b>\n\n", "日本🙂é<t>文<t><t>", "\u00ff\t"])
def test_text_is_what_the_decoder_prints(make: object, text: str) -> None:
    tokenizer = make(["<t>"])
    ids = tokenizer.encode(text)
    assert text_of(tokenizer, ids).text == tokenizer.decode(ids) == text


def test_every_character_knows_its_token() -> None:
    tokenizer = byte_level(["<t>"])
    # Both letters are three bytes: one merge holds two of those of "日", each other byte is its own token.
    ids = tokenizer.encode("a本<t>日too")
    source = text_of(tokenizer, ids)
    assert len(ids) == 1 + 3 + 1 + 2 + 1
    tokens = [source.tokens_of(char, char + 1) for char in range(len(source.text))]
    assert tokens == [(0, 1), (1, 4), *[(4, 5)] * 3, (5, 7), *[(7, 8)] * 3]
    assert source.tokens_of(0, len(source.text)) == (0, len(ids))


def test_an_added_token_counts_only_as_a_token() -> None:
    tokenizer = byte_level(["<t>"])
    ids = [*tokenizer.encode_run("<t>").ids, *tokenizer.encode("<t>x")]
    source = text_of(tokenizer, ids)
    assert source.text == "<t><t>x"
    assert source.find("<t>", 0, 7) == 3
    assert source.find("<t>x", 0, 7) == 3
    assert source.find("<t>", 0, 5) == -1
    assert [source.find_last(text) for text in ("<t>", "<", "<t>x", "y")] == [3, 3, 3, -1]
    assert source.find(">", 0, 7) == 2
    assert not source.at("<t>", 0, 7)
    assert [source.added_before(char) for char in (0, 3, 6, 7)] == [False, False, True, False]


def test_a_vocabulary_of_words_is_decoded_token_by_token() -> None:
    engine = Engine(models.WordLevel({"[UNK]": 0, "hello": 1, "there": 2}, unk_token="[UNK]"))
    engine.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine.decoder = decoders.WordPiece(prefix="##")
    source = text_of(Tokenizer(engine), [1, 2])
    assert source.text == "hellothere"
    assert source.tokens_of(5, 10) == (1, 2)


def test_two_hexadecimal_digits_spell_a_byte_and_other_characters_themselves() -> None:
    assert [_byte_fallback(token) for token in ("<0x0A>", "<0x0a>", "<0xZZ>")] == [b"\n", b"\n", b"<0xZZ>"]
