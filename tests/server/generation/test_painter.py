"""A painter gives its parser's pieces, and each character the colour of the token it is from."""

import random

import pytest
from tokenizer_folders import BYTES

from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.requests.outputs import TextDelta
from jaxspec.server.generation.chat_pieces import TokenAttribution
from jaxspec.text.parsers import parser_for
from jaxspec.text.parsers.output_parser import joined
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.viz.colored_tokens import TokenPieces

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
THINKS = parser_for("</think> <tool_call> <function=")
CALL = "<tool_call>\n<function=f>\n<parameter=X>\n12\n</parameter>\n</function>\n</tool_call>"
# Reasoning and content are written in characters that no tag has.
TEXTS = [
    "12 34é🙂 <5",
    "<think>\nWHY 1 <2\n</think>\n\nTHUS 3\n\n",
    f"<think>1</think>2 \n{CALL}\n 3",
    f"1{CALL}2{CALL[:-20]}",
    "1 <tool_call>\n2",
    "<think>1 < 2 </thin 3",
]


@pytest.fixture(scope="module", params=[BYTES, EMBEDDED_MODEL], ids=["bytes", "embedded"])
def tokenizer(request):
    return Tokenizer(request.param)


def deltas(tokenizer, ids, positions, rng):
    """The tokens in pieces of any number, as a stream gives them."""
    stream, start = tokenizer.stream(False), 0
    while start < len(ids):
        end = start + rng.randint(1, 4)
        text = stream.push(ids[start:end])
        yield TextDelta(text, ids[start:end], draft_positions=positions[start:end])
        start = end
    yield TextDelta(stream.flush(), [], finish_reason="length")


def painter(tokenizer, dialect=THINKS):
    parser = dialect(starts_in_reasoning=False, tools=TOOLS)
    return TokenAttribution(parser, tokenizer, skip_special_tokens=False)


def coloured(tokens):
    return [(character, token.position) for token in tokens for character in token.text]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_parser_s_and_tokens_joined_are_their_text(text, tokenizer):
    rng = random.Random(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    parser = THINKS(starts_in_reasoning=False, tools=TOOLS)
    expected = joined(parser.push(text) + parser.flush())
    for _ in range(20):
        positions = [rng.randrange(4) for _ in ids]
        reader = painter(tokenizer)
        found = [
            each for delta in deltas(tokenizer, ids, positions, rng) for each in reader.read(delta)
        ]
        assert joined([piece for piece, _ in found]) == expected
        for piece, tokens in found:
            is_call = piece.kind.startswith("tool")
            assert "".join(token.text for token in tokens) == ("" if is_call else piece.text)


@pytest.mark.parametrize("text", TEXTS[:2])
def test_a_character_has_the_colour_of_its_token(text, tokenizer):
    rng = random.Random(text)
    ids = tokenizer.encode(text, add_special_tokens=False)
    positions = [rng.randrange(4) for _ in ids]
    splitter = TokenPieces(tokenizer, skip_special_tokens=False)
    given = coloured(splitter.push(ids, positions) + splitter.flush())
    reader = painter(tokenizer)
    told = deltas(tokenizer, ids, positions, rng)
    found = [
        each for delta in told for _, tokens in reader.read(delta) for each in coloured(tokens)
    ]
    signs = set("0123456789WHYTHUSé🙂")
    assert [each for each in found if each[0] in signs] == [
        each for each in given if each[0] in signs
    ]


def test_tokens_of_half_a_character_stand_with_it(tokenizer):
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    reader = painter(tokenizer, parser_for(None))
    found = [tokens for token in ids for _, tokens in reader.read(delta_of(tokenizer, ids, token))]
    assert [token.text for tokens in found for token in tokens] == [""] * (len(ids) - 1) + ["🙂"]


def delta_of(tokenizer, ids, token):
    is_last = token is ids[-1]
    return TextDelta("🙂" if is_last else "", [token], draft_positions=[1])


def test_what_a_stop_string_cuts_off_is_not_told(tokenizer):
    """The tokens go on behind the text, which ends where the stop string begins."""
    ids = tokenizer.encode("1234", add_special_tokens=False)
    reader = painter(tokenizer, parser_for(None))
    delta = TextDelta("12", ids, finish_reason="stop", draft_positions=[0] * len(ids))
    assert [piece.text for piece, _ in reader.read(delta)] == ["12"]


def test_a_text_that_its_tokens_do_not_give_is_told_all_the_same(tokenizer):
    reader = painter(tokenizer, parser_for(None))
    ids = tokenizer.encode("12", add_special_tokens=False)
    (found,) = reader.read(TextDelta("x", ids, draft_positions=[3] * len(ids)))
    assert found[0].text == "x" and [tuple(token) for token in found[1]] == [("x", 3)]
