"""Answer: one answer of a model in a terminal, as it comes, and its figures."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.async_stream import AsyncStream
from jaxspec.commands.figures import summary
from jaxspec.outputs import TextDelta
from jaxspec.painted_text import Piece as PaintedPiece
from jaxspec.painted_text import TokenPieces, ansi, ansi_legend
from jaxspec.request import RequestMetrics
from jaxspec.server.parsers import Dialect, Piece, starts_in_reasoning
from jaxspec.tokenizer import Tokenizer

Look = Callable[[TextDelta, Sequence[Piece]], str]
"""What is printed of a delta, whose text has these parts."""
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Turn:
    """The figures of an answer that is whole."""

    metrics: RequestMetrics
    num_tokens: int
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int  # of those
    finish_reason: str | None = "stop"

    def __str__(self) -> str:
        """One line."""
        first = f"{1000 * (self.metrics.ttft or 0.0):.0f} ms to the first token"
        cached = f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens cached"
        is_cut = ", cut at its length" if self.finish_reason == "length" else ""
        line = summary(self.metrics, self.num_tokens, self.seconds)
        return f"[{line}, {first}, {cached}{is_cut}]"


class Answer:
    """Takes the pieces of a stream; knows what to print, what the message is, and its figures."""

    def __init__(self, stream: AsyncStream, dialect: Dialect, look: Look):
        """Begin; `dialect` tells reasoning from content."""
        self._stream, self._look = stream, look
        begins = dialect.thinks and starts_in_reasoning(stream.prompt or "")
        self._parser = dialect(starts_in_reasoning=begins)
        self._parts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._began, self._num_tokens = time.perf_counter(), 0
        self._draft_positions = list[int]()
        self._finish_reason: str | None = None
        self._metrics = RequestMetrics()

    def push(self, delta: TextDelta) -> str:
        """What to print of a delta."""
        self._num_tokens += len(delta.token_ids)
        self._draft_positions += delta.draft_positions
        self._finish_reason = delta.finish_reason
        self._metrics = delta.metrics or self._metrics
        pieces = self._parser.push(delta.text)
        if delta.finish_reason:
            pieces += self._parser.flush()
        return self._look(delta, self._kept(pieces))

    @property
    def message(self) -> dict[str, Any] | None:
        """The message as far as it came; None if no token has come."""
        if not self._num_tokens:
            return None
        self._kept(self._parser.flush())
        told = {"role": "assistant", "content": "".join(self._parts["content"])}
        if self._parts["reasoning"]:
            told["reasoning_content"] = "".join(self._parts["reasoning"])
        return told

    @property
    def turn(self) -> Turn:
        """The figures, once the stream has ended."""
        return Turn(
            metrics=self._metrics,
            num_tokens=self._num_tokens,
            seconds=time.perf_counter() - self._began,
            num_prompt_tokens=len(self._stream.prompt_token_ids),
            num_cached_tokens=self._stream.num_cached_tokens,
            finish_reason=self._finish_reason,
        )

    @property
    def legend(self) -> str:
        """How many of the tokens came from whom, on one line for a terminal."""
        return ansi_legend(self._draft_positions)

    def _kept(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        for piece in pieces:
            self._parts[piece.kind].append(piece.text)
        return pieces


def plain(delta: TextDelta, pieces: Sequence[Piece]) -> str:
    """The text as the model wrote it."""
    return delta.text


def by_draft(tokenizer: Tokenizer) -> Look:
    """Each token in the colour of who gave it."""
    tokens = TokenPieces(tokenizer)

    def shown(delta: TextDelta, pieces: Sequence[Piece]) -> str:
        new = tokens.push(delta.token_ids, delta.draft_positions)
        return ansi(new + tokens.flush() if delta.finish_reason else new)

    return shown


def by_part() -> Look:
    """Reasoning dim, and an empty line between it and the content."""
    before = ""

    def shown(delta: TextDelta, pieces: Sequence[Piece]) -> str:
        nonlocal before
        told = []
        for piece in pieces:
            gap = "\n\n" if before == "reasoning" and piece.kind == "content" else ""
            text = ansi([PaintedPiece(piece.text, 0)])  # without control characters
            told.append(gap + (dim(text) if piece.kind == "reasoning" else text))
            before = piece.kind
        return "".join(told)

    return shown


def dim(text: str) -> str:
    """Text of less weight, in a terminal."""
    return f"{_DIM}{text}{_RESET}"
