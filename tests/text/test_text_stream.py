"""Text that is streamed is the text of all tokens, however they come."""

import random

import pytest
from tokenizer_folders import BYTES, sentencepiece_folder

from jaxspec.text.tokenizer import Tokenizer

UNICODE = "naïve 你好 🙂‍↔️ \u0301é \ufffd\x00\r\n end"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BYTES)


def split(ids, rng):
    cuts = sorted(rng.randrange(len(ids) + 1) for _ in range(rng.randrange(8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def streamed(stream, pieces):
    return "".join([*(stream.push(piece) for piece in pieces), stream.flush()])


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("alphabet", ["text", "bytes", "all ids"])
def test_streamed_text_is_the_decoded_text(alphabet, skip_special_tokens, tokenizer):
    rng = random.Random(alphabet)
    for _ in range(100):
        if alphabet == "text":
            ids = tokenizer.encode("".join(rng.choices(UNICODE, k=20)))
        else:
            ids = rng.choices(range(256 if alphabet == "bytes" else 270), k=rng.randrange(30))
        expected = tokenizer.decode(ids, skip_special_tokens)
        for pieces in ([ids], [[i] for i in ids], split(ids, rng)):
            assert streamed(tokenizer.stream(skip_special_tokens), pieces) == expected


def test_streamed_text_is_the_decoded_text_with_byte_fallback(tmp_path):
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path))
    euro, first = [9 + byte for byte in "€".encode()], [2, 3]
    assert tokenizer.decode([*first, *euro]) == "Hello world€"
    rng = random.Random(0)
    choices = [*range(9), *range(9), *euro, *euro, 9 + 0xE4, 9 + 65]
    for _ in range(300):
        ids = rng.choices(choices, k=rng.randrange(16))
        for pieces in ([ids], [[i] for i in ids], split(ids, rng)):
            assert streamed(tokenizer.stream(), pieces) == tokenizer.decode(ids)


def test_unfinished_characters_wait(tokenizer):
    stream = tokenizer.stream()
    smile = list("🙂".encode())
    assert [stream.push([byte]) for byte in [97, *smile, 98]] == ["a", "", "", "", "🙂", "b"]
    assert stream.push([98, *smile[:2]]) == "b"
    assert stream.flush() == "\ufffd"
    assert stream.push([99]) == "c"


def test_invalid_bytes_do_not_hold_up_what_follows(tokenizer):
    stream = tokenizer.stream()
    assert stream.push([0xFF, 0xFE]) == "\ufffd"
    assert stream.push([97]) == "\ufffda"
