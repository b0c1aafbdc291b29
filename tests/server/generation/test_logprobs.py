"""Logprobs in OpenAI's forms, for tokens that are half a character too."""

import json

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.requests.logprobs import Logprob
from jaxspec.server.generation.logprobs import LegacyLogprobs, chat_logprobs, prompt_logprobs
from jaxspec.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(EMBEDDED_MODEL)
TEXT = "é → 語"


def places_of(tokens):
    """Each token is the second likeliest of its place."""
    return [
        {token: Logprob(-1.5, 2), token + 1: Logprob(-0.5, 1), token + 2: Logprob(-9.0, 3)}
        for token in tokens
    ]


def test_bytes_of_tokens_are_those_of_the_text():
    tokens = TOKENIZER.encode(TEXT)
    assert len(tokens) > len(TEXT), "some tokens are half a character"
    assert b"".join(map(TOKENIZER.bytes_of, tokens)).decode() == TEXT


def test_a_chat_s_entries_have_exact_bytes_and_the_likeliest_first():
    tokens = TOKENIZER.encode(TEXT)
    found = chat_logprobs(places_of(tokens), 2, TOKENIZER)
    assert b"".join(bytes(entry["bytes"]) for entry in found).decode() == TEXT
    assert {entry["logprob"] for entry in found} == {-1.5}
    assert all([t["logprob"] for t in entry["top_logprobs"]] == [-0.5, -1.5] for entry in found)
    assert chat_logprobs(places_of(tokens), 0, TOKENIZER)[0]["top_logprobs"] == []


def test_lists_stand_beside_each_other_however_they_are_cut():
    tokens = TOKENIZER.encode(TEXT)
    whole = LegacyLogprobs(1, TOKENIZER).read(places_of(tokens), tokens)
    reader = LegacyLogprobs(1, TOKENIZER)
    parts = [reader.read(places_of([token]), [token]) for token in tokens]
    for name, values in whole.items():
        assert values == [value for part in parts for value in part[name]]
    assert whole["text_offset"] == sorted(whole["text_offset"])
    assert whole["text_offset"][-1] < len(TEXT)
    # The likeliest, and the token itself, which need not be that.
    assert [sorted(top.values()) for top in whole["top_logprobs"]] == [[-1.5, -0.5]] * len(tokens)
    assert all(
        name in top for name, top in zip(whole["tokens"], whole["top_logprobs"], strict=True)
    )


def test_a_token_that_is_no_text_has_its_bytes_for_a_name():
    (half, *_) = TOKENIZER.encode("語")
    raw = TOKENIZER.bytes_of(half)
    found = LegacyLogprobs(0, TOKENIZER).read([None], [half])
    assert found["tokens"] == ["bytes:" + "".join(f"\\x{b:02x}" for b in raw)]
    assert found["token_logprobs"] == [None] and found["top_logprobs"] == [None]


def test_what_json_has_no_number_for_is_very_unlikely():
    places = [None, {3: Logprob(float("-inf"), 9, "a")}]
    found = prompt_logprobs(places)
    assert found == [None, {"3": {"logprob": -9999.0, "rank": 9, "decoded_token": "a"}}]
    json.dumps(found, allow_nan=False)
