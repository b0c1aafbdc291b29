"""Painted text is the text itself: nothing lost, nothing interpreted, each token in its colour."""

import html
import random
import re

import pytest
from tokenizer_folders import BYTES, sentencepiece_folder

from jaxspec.requests.outputs import CompletionOutput, RequestOutput
from jaxspec.requests.request import RequestMetrics
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.viz.colored_tokens import GROUNDS, ColoredText, Piece, TokenPieces, ansi, ansi_legend

MARK = re.compile(r"\x1b\[[\d;]+m")
TAG = re.compile(r"<[^>]+>")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(BYTES)


def sample(text, ids, positions):
    return CompletionOutput(0, text, list(ids), "length", RequestMetrics(), list(positions))


def pieces_of(tokenizer, ids, positions):
    splitter = TokenPieces(tokenizer)
    pieces = []
    for token, position in zip(ids, positions, strict=True):
        pieces += splitter.push([token], [position])
    return [piece for piece in pieces + splitter.flush() if piece.text]


def spans(painted):
    """(colour, title, text) of each coloured piece in HTML, without the legend."""
    body = painted._repr_html_().split('<div style="margin-top')[0]
    found = re.findall(r'<span style="([^"]*)" title="([^"]*)">([^<]*)</span>', body)
    return [(style, title, html.unescape(text)) for style, title, text in found]


def test_a_character_of_several_tokens_is_whole_and_the_last_ones(tokenizer):
    ids = [*b" x", *"€".encode(), *b"\n "]
    pieces = pieces_of(tokenizer, ids, [0, 1, 2, 3, 0, 1, 2])
    assert pieces == [(" ", 0), ("x", 1), ("€", 0), ("\n", 1), (" ", 2)]


def test_byte_tokens_that_wait_for_what_follows_keep_their_own_pieces(tmp_path):
    """SentencePiece's decoder settles a run of bytes when it is over; whose they are is known."""
    tokenizer = Tokenizer(sentencepiece_folder(tmp_path))
    ids = [2, *(9 + byte for byte in "é€".encode()), 3]
    pieces = pieces_of(tokenizer, ids, [0, 1, 2, 3, 0, 1, 2])
    assert pieces == [("Hello", 0), ("é", 2), ("€", 1), (" world", 2)]


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_pieces_joined_are_the_text_whatever_the_tokens(kind, tokenizer, tmp_path):
    if kind == "sentencepiece":
        tokenizer = Tokenizer(sentencepiece_folder(tmp_path))
    rng = random.Random(0)
    for _ in range(150):
        ids = rng.choices([*range(9), *range(0xB0, 0xF8), 32, 10, 97], k=rng.randrange(14))
        positions = rng.choices(range(4), k=len(ids))
        pieces = pieces_of(tokenizer, ids, positions)
        assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
        together = ColoredText.of(sample(tokenizer.decode(ids), ids, positions), tokenizer)
        assert [piece for piece in together.pieces if piece.text] == pieces


def test_html_shows_the_very_text(tokenizer):
    text = "<b>&amp; \"q\"\n\t  'end'"
    painted = ColoredText.of(sample(text, text.encode(), [1] * len(text)), tokenizer)
    assert [shown for _, _, shown in spans(painted)] == list(text)
    page = painted._repr_html_()
    assert "white-space:pre-wrap" in page and set(TAG.findall(page.replace(text, ""))) <= {
        *re.findall(r"<(?:div|span) style=[^>]*>", page),
        "</div>",
        "</span>",
    }


def test_the_target_s_tokens_look_like_text_and_drafts_say_their_number(tokenizer):
    painted = ColoredText.of(sample("abcd", b"abcd", [0, 1, 2, 0]), tokenizer)
    assert [(title, text) for _, title, text in spans(painted)] == [
        ("draft 1", "b"),
        ("draft 2", "c"),
    ]
    page = TAG.sub("", painted._repr_html_()).replace(" &nbsp; ", ", ")
    assert page == "abcdtarget 2 (50%), draft 1 1 (25%), draft 2 1 (25%)"


def test_drafts_are_legible_on_dark_and_on_light():
    """Black letters on their own ground: a contrast of 7 at least (WCAG's AAA)."""
    painted = ColoredText("", [Piece("x", j) for j in range(1, 9)], range(1, 9))
    styles = [style for style, _, _ in spans(painted)]
    assert len(set(styles)) == len(set(GROUNDS)) == 8
    for style in styles:
        ground, letters = re.fullmatch(r"background-color:#(\w{6});color:#(\w{6})", style).groups()
        assert letters == "000000"
        light = [int(ground[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        light = [((x + 0.055) / 1.055) ** 2.4 for x in light]
        luminance = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]
        assert (luminance + 0.05) / 0.05 >= 7


def test_a_terminal_gets_the_text_and_no_colour_beyond_a_line(tokenizer):
    text = "a\n\n b"
    painted = ColoredText.of(sample(text, text.encode(), [0, 1, 2, 3, 0]), tokenizer)
    shown = str(painted)
    assert shown == painted.ansi()
    assert MARK.sub("", shown).startswith(text + "\n\ntarget 2 (40%)   draft 1 1 (20%)")
    for line in shown.split("\n"):
        assert len(re.findall(r"\x1b\[38", line)) == line.count("\x1b[0m")
        assert line.count("\x1b") == 0 or line.rindex("\x1b[0m") > line.rindex("\x1b[38")


def test_a_model_cannot_give_orders_to_the_terminal():
    shown = ansi([Piece("\x1b[31mred\x07\r", 0), Piece("\x7f\t", 1)])
    assert MARK.sub("", shown) == "␛[31mred␇␍␡\t"


def test_nothing_behind_a_stop_string_is_shown(tokenizer):
    """Tokens up to the one that completed it are there, and their text ends before it."""
    painted = ColoredText.of(sample("ab", b"abEND", [0, 1, 2, 3, 0]), tokenizer)
    assert "".join(piece.text for piece in painted.pieces) == "ab"
    assert "draft 3" in str(painted) and "END" not in str(painted)


def test_a_request_shows_its_prompt_unpainted(tokenizer):
    request = RequestOutput("1 < 2 ", [1], [sample("ok", b"ok", [1, 1])])
    painted = ColoredText.of(request, tokenizer)
    assert "1 &lt; 2 <span" in painted._repr_html_() and str(painted).startswith("1 < 2 \x1b[38")


def test_what_cannot_be_painted_is_refused(tokenizer):
    two = RequestOutput("x", [1], [sample("a", b"a", [0])] * 2)
    with pytest.raises(ValueError, match=r"this request has 2. Pass one of its `outputs`"):
        ColoredText.of(two, tokenizer)
    with pytest.raises(ValueError, match="Pass the `tokenizer` of the LLM"):
        ColoredText.of(sample("b", b"a", [0]), tokenizer)


def test_no_tokens_are_no_error(tokenizer):
    painted = ColoredText.of(sample("", [], []), tokenizer)
    assert "0 tokens" in str(painted) and painted._repr_html_()
    assert repr(painted) == "ColoredText(0 tokens)"
    assert ansi_legend([]) == "0 tokens"
