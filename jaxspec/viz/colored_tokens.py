"""Text coloured by the source of each token: the target itself, or draft 1, 2, ... of a verify.

Drafts have a light background and black letters, which are readable on dark and on light pages.
Tokens of the target look like ordinary text.
"""

import collections
import dataclasses
import html
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxspec.requests.outputs import CompletionOutput, RequestOutput
from jaxspec.text.tokenizer import Tokenizer

GROUNDS = (151, 153, 222, 216, 183, 218, 147, 187)
"""Backgrounds of drafts 1 to 8, as numbers of a terminal's 256 colours."""
_LEVELS = (0, 95, 135, 175, 215, 255)  # intensities of red, green and blue in those colours
_RESET = "\x1b[0m"
# A control character would move a terminal's cursor or change its colours: U+241B for ESC.
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


class Piece(NamedTuple):
    """Text of one token, possibly empty, and its source (`CompletionOutput.draft_positions`)."""

    text: str
    position: int


class TokenPieces:
    """Incremental splitter of text into one piece per token.

    Joined, the pieces equal `Tokenizer.decode` of all ids. A character that consists of several
    tokens is in the piece of the last one.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        """Start empty; `skip_special_tokens` is as in `SamplingParams`."""
        self._stream = tokenizer.stream(skip_special_tokens)
        self._held: list[tuple[int, str]] = []  # tokens without a piece, and the waiting text
        self._position = 0  # position of the newest token

    def push(self, token_ids: Iterable[int], draft_positions: Iterable[int]) -> list[Piece]:
        """Return the pieces that are final; bytes of an incomplete character are held back."""
        pieces = []
        for token, position in zip(token_ids, draft_positions, strict=True):
            text = self._stream.push([token])
            self._position = position
            self._held.append((position, self._stream.waiting))
            pieces += self._share(text) if text else []
        return pieces

    def flush(self) -> list[Piece]:
        """Return the pieces held back, at the end of the output."""
        return self._share(self._stream.flush())

    def _share(self, text: str) -> list[Piece]:
        """Split `text` among the held tokens, by the text that waited with each."""
        pieces, start = [], 0
        for position, waiting in self._held[:-1]:
            end = max(start, _num_common(waiting, text))
            pieces.append(Piece(text[start:end], position))
            start = end
        self._held.clear()
        return [*pieces, Piece(text[start:], self._position)]


@dataclasses.dataclass(frozen=True, repr=False)
class ColoredText:
    """A sample in colours, for a notebook (`_repr_html_`) or a terminal (`str`, `ansi`).

    A legend below the text counts the tokens of each source.
    """

    prompt: str  # shown before the text, without colours
    pieces: Sequence[Piece]
    draft_positions: Sequence[int]

    @staticmethod
    def of(output: RequestOutput | CompletionOutput, tokenizer: Tokenizer | None) -> "ColoredText":
        """Return the only sample of `output`, after its prompt; without `tokenizer`, as token ids.

        Raises:
            ValueError: `output` has several samples, or its text is not that of `tokenizer`.
        """
        prompt = ""
        if isinstance(output, RequestOutput):
            if len(output.outputs) != 1:
                raise ValueError(
                    f"One sample at a time can be painted, and this request has "
                    f"{len(output.outputs)}. Pass one of its `outputs`."
                )
            prompt, output = output.prompt or "", output.outputs[0]
        ids, positions = output.token_ids, output.draft_positions
        if tokenizer is None:
            pieces = [Piece(f"{token} ", j) for token, j in zip(ids, positions, strict=True)]
            return ColoredText(prompt, pieces, positions)
        splitter = TokenPieces(tokenizer)
        pieces = splitter.push(ids, positions) + splitter.flush()
        if not "".join(piece.text for piece in pieces).startswith(output.text):
            raise ValueError(
                "Text is painted with the tokenizer that made it, and this one gives another text. "
                "Pass the `tokenizer` of the LLM that the output came from."
            )
        return ColoredText(prompt, _first(pieces, len(output.text)), positions)

    def __repr__(self) -> str:
        """Return a short text: notebooks store it in addition to the HTML."""
        return f"ColoredText({len(self.draft_positions)} tokens)"

    def _repr_html_(self) -> str:
        style = "font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere"
        text = html.escape(self.prompt) + "".join(map(_html, self.pieces))
        shares = [f"{_html(name)} {share}" for name, share in _legend(self.draft_positions)]
        legend = f'<div style="margin-top:0.8em">{" &nbsp; ".join(shares)}</div>'
        return f'<div style="{style}">{text}{legend}</div>'

    def ansi(self) -> str:
        """Return the text for a terminal with 256 colours, and the legend on the last line."""
        prompt = self.prompt.translate(_CONTROLS)
        return f"{prompt}{ansi(self.pieces)}\n\n{ansi_legend(self.draft_positions)}"

    __str__ = ansi


def ansi(pieces: Iterable[Piece]) -> str:
    return "".join(map(_ansi, pieces))


def ansi_legend(draft_positions: Sequence[int]) -> str:
    """Return the token counts of all sources, on one line for a terminal."""
    shares = _legend(draft_positions)
    return "   ".join(f"{_ansi(name)} {share}" for name, share in shares) or "0 tokens"


def _legend(draft_positions: Sequence[int]) -> list[tuple[Piece, str]]:
    """Return a coloured label and the token count of each source."""
    counts, total = collections.Counter(draft_positions), len(draft_positions)
    return [
        (Piece(f"draft {j}" if j else "target", j), f"{count} ({count / total:.0%})")
        for j, count in sorted(counts.items())
    ]


def html_ground(position: int) -> str:
    """Return the background of draft `position` (from 1 on) as an HTML colour."""
    red, rest = divmod(_ground(position) - 16, 36)
    return "#" + "".join(f"{_LEVELS[level]:02x}" for level in (red, *divmod(rest, 6)))


def _ground(position: int) -> int:
    return GROUNDS[(position - 1) % len(GROUNDS)]


def _html(piece: Piece) -> str:
    text = html.escape(piece.text)
    if not piece.position or not text:
        return text
    style = f"background-color:{html_ground(piece.position)};color:#000000"
    return f'<span style="{style}" title="draft {piece.position}">{text}</span>'


def _ansi(piece: Piece) -> str:
    """Return the piece with colours off at line ends, where some terminals would fill the line."""
    text = piece.text.translate(_CONTROLS)
    if not piece.position:
        return text
    begin = f"\x1b[38;5;16;48;5;{_ground(piece.position)}m"
    return "\n".join(line and f"{begin}{line}{_RESET}" for line in text.split("\n"))


def _first(pieces: Iterable[Piece], length: int) -> list[Piece]:
    first = list[Piece]()
    for piece in pieces:
        first.append(Piece(piece.text[:length], piece.position))
        length -= len(first[-1].text)
    return first


def _num_common(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return len(os.path.commonprefix([one, other]))
