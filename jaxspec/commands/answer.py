"""One streamed answer in a terminal: its text, chat message and stats."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.commands.figures import summary
from jaxspec.engine.async_stream import AsyncStream
from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.request import RequestMetrics
from jaxspec.text.parsers import Dialect, Piece, starts_in_reasoning
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.viz.colored_tokens import Piece as PaintedPiece
from jaxspec.viz.colored_tokens import TokenPieces, ansi, ansi_legend

Look = Callable[[TextDelta, Sequence[Piece]], str]
"""Returns the text to print for a delta, given the parsed pieces of its text."""
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Turn:
    """Stats of a complete answer."""

    metrics: RequestMetrics
    num_tokens: int
    seconds: float
    num_prompt_tokens: int
    num_cached_tokens: int  # prompt tokens in the cached prefix
    finish_reason: str | None = "stop"

    def __str__(self) -> str:
        first = f"{1000 * (self.metrics.ttft or 0.0):.0f} ms to the first token"
        cached = f"{self.num_cached_tokens} of {self.num_prompt_tokens} prompt tokens cached"
        is_cut = ", cut at its length" if self.finish_reason == "length" else ""
        line = summary(self.metrics, self.num_tokens, self.seconds)
        return f"[{line}, {first}, {cached}{is_cut}]"


class Answer:
    """Collects the deltas of a stream: text to print, chat message and stats."""

    def __init__(self, stream: AsyncStream, dialect: Dialect, look: Look):
        """Start without tokens; `dialect` parses reasoning and content."""
        self._stream, self._look = stream, look
        begins = dialect.thinks and starts_in_reasoning(stream.prompt or "")
        self._parser = dialect(starts_in_reasoning=begins)
        self._parts: dict[str, list[str]] = {"reasoning": [], "content": []}
        self._began, self._num_tokens = time.perf_counter(), 0
        self._draft_positions = list[int]()
        self._finish_reason: str | None = None
        self._metrics = RequestMetrics()

    def push(self, delta: TextDelta) -> str:
        """Add a delta and return the text to print."""
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
        """The assistant's message so far; None before the first token."""
        if not self._num_tokens:
            return None
        self._kept(self._parser.flush())
        told = {"role": "assistant", "content": "".join(self._parts["content"])}
        if self._parts["reasoning"]:
            told["reasoning_content"] = "".join(self._parts["reasoning"])
        return told

    @property
    def turn(self) -> Turn:
        """The stats; complete after the stream has ended."""
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
        """Legend with token counts by draft position, as one line for a terminal."""
        return ansi_legend(self._draft_positions)

    def _kept(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        for piece in pieces:
            self._parts[piece.kind].append(piece.text)
        return pieces


def plain(delta: TextDelta, pieces: Sequence[Piece]) -> str:
    """Return the text unchanged (a `Look`)."""
    return delta.text


def by_draft(tokenizer: Tokenizer) -> Look:
    """Return a `Look` that colors each token by its draft position."""
    tokens = TokenPieces(tokenizer)

    def shown(delta: TextDelta, pieces: Sequence[Piece]) -> str:
        new = tokens.push(delta.token_ids, delta.draft_positions)
        return ansi(new + tokens.flush() if delta.finish_reason else new)

    return shown


def by_part() -> Look:
    """Return a `Look` that dims reasoning and puts an empty line before the content."""
    before = ""

    def shown(delta: TextDelta, pieces: Sequence[Piece]) -> str:
        nonlocal before
        told = []
        for piece in pieces:
            gap = "\n\n" if before == "reasoning" and piece.kind == "content" else ""
            text = ansi([PaintedPiece(piece.text, 0)])  # escapes control characters
            told.append(gap + (dim(text) if piece.kind == "reasoning" else text))
            before = piece.kind
        return "".join(told)

    return shown


def dim(text: str) -> str:
    return f"{_DIM}{text}{_RESET}"
