"""Painter: which tokens gave the text that a parser found, and who gave those tokens."""

from collections.abc import Sequence

from jaxspec.outputs import TextDelta
from jaxspec.painted_text import Piece as Token
from jaxspec.painted_text import TokenPieces
from jaxspec.server.parsers import OutputParser, Piece
from jaxspec.tokenizer import Tokenizer

Painted = tuple[Piece, list[Token]]
"""A parser's piece and its tokens, whose texts joined are the piece's; a tool call has none."""


class Painter:
    """Reads one sample through a parser, token by token, so that it knows what each one gave.

    A parser holds back what may be a tag, and leaves tags out. A piece is looked for from the end
    of the text that went in; where it stands tells its tokens.
    """

    def __init__(self, parser: OutputParser, tokenizer: Tokenizer, *, skip_special_tokens: bool):
        """`skip_special_tokens`: as in the sample's `SamplingParams`."""
        self._parser = parser
        self._splitter = TokenPieces(tokenizer, skip_special_tokens=skip_special_tokens)
        self._coming = list[Token]()  # of tokens whose text the sample has not told yet
        self._inside = list[Token]()  # what the parser was given since it last gave text

    def read(self, delta: TextDelta) -> list[Painted]:
        """What a delta adds; its last one takes what the parser still held."""
        self._coming += self._splitter.push(delta.token_ids, delta.draft_positions)
        is_over = delta.finish_reason is not None
        if is_over:
            self._coming += self._splitter.flush()
        found = list[Painted]()
        for token in self._told(delta.text):
            self._inside.append(token)
            found += self._painted(self._parser.push(token.text))
        if is_over:
            found += self._painted(self._parser.flush())
        return _joined(found)

    def _told(self, text: str) -> list[Token]:
        """The tokens whose texts joined are `text`; a stop string may cut the last of them."""
        tokens, rest = _parts(self._coming, 0, len(text)), _parts(self._coming, len(text), None)
        if "".join(token.text for token in tokens) != text:  # a sample's own way to detokenize
            tokens = [Token(text, tokens[-1].position if tokens else 0)]
        self._coming = rest
        return tokens

    def _painted(self, pieces: Sequence[Piece]) -> list[Painted]:
        if all(piece.kind.startswith("tool") for piece in pieces):
            return [(piece, []) for piece in pieces]  # one that goes wrong may come back as text
        given = "".join(token.text for token in self._inside)
        found, end, rest = list[Painted](), len(given), 0
        for piece in reversed(pieces):
            if piece.kind.startswith("tool"):
                found.append((piece, []))
                continue
            start = given.rfind(piece.text, 0, end)
            if start < 0:  # no parser of ours writes text of its own
                found.append((piece, [Token(piece.text, self._inside[-1].position)]))
                continue
            end = start
            rest = max(rest, start + len(piece.text))
            found.append((piece, _parts(self._inside, start, start + len(piece.text))))
        self._inside = _parts(self._inside, rest, None)
        return found[::-1]


def _parts(tokens: Sequence[Token], start: int, end: int | None) -> list[Token]:
    """What tokens have of the characters `start` to `end` of their joined texts.

    A token without text stands with the character behind it.
    """
    found, place = list[Token](), 0
    for token in tokens:
        first, last = place, place + len(token.text)
        place = last
        is_inside = last > start if token.text else first >= start
        if is_inside and (end is None or first < end):
            text = token.text[max(0, start - first) : None if end is None else end - first]
            found.append(Token(text, token.position))
    return found


def _joined(found: Sequence[Painted]) -> list[Painted]:
    """Neighbours of one kind and call as one, as a parser gives them for a text in one piece."""
    joined = list[Painted]()
    for piece, tokens in found:
        before = joined[-1][0] if joined else None
        if before is not None and (before.kind, before.index) == (piece.kind, piece.index):
            joined[-1] = (before._replace(text=before.text + piece.text), joined[-1][1] + tokens)
        else:
            joined.append((piece, tokens))
    return joined
