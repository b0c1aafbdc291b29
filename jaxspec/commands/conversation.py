"""A chat conversation in a terminal: its messages, streamed answers and their stats."""

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.commands.stats import failure, summary
from jaxspec.engine.async_stream import AsyncStream
from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.parsers import PLAIN, Dialect, Piece, parser_for, starts_in_reasoning
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.viz.colored_tokens import Piece as ColoredPiece
from jaxspec.viz.colored_tokens import TokenPieces, ansi, ansi_legend

Look = Callable[[TextDelta, Sequence[Piece]], str]
"""Returns the text to print for a delta, given the parsed pieces of its text."""
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


@dataclasses.dataclass(frozen=True)
class Turn:
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
        message = {"role": "assistant", "content": "".join(self._parts["content"])}
        if self._parts["reasoning"]:
            message["reasoning_content"] = "".join(self._parts["reasoning"])
        return message

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
        printed = []
        for piece in pieces:
            gap = "\n\n" if before == "reasoning" and piece.kind == "content" else ""
            text = ansi([ColoredPiece(piece.text, 0)])  # escapes control characters
            printed.append(gap + (dim(text) if piece.kind == "reasoning" else text))
            before = piece.kind
        return "".join(printed)

    return shown


def dim(text: str) -> str:
    return f"{_DIM}{text}{_RESET}"


class Conversation:
    """Messages in OpenAI's form, oldest first; every turn renders all of them."""

    def __init__(
        self,
        llm: AsyncLLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        color: bool = False,
        is_terminal: bool = False,
    ):
        """Start without messages, except for the system prompt `system`.

        `color`: color each token by its draft position. `is_terminal`: dim the reasoning and escape
        control characters of the model.
        """
        self._llm, self._color, self._is_terminal = llm, color, is_terminal
        words = llm.tokenizer
        self._dialect = parser_for(words.chat_template, words.has_token) if words else PLAIN
        self._params = params.clone()
        if self._dialect.thinks:
            self._params.skip_special_tokens = False  # reasoning tags may be special tokens
        self.system = system
        self._messages: list[dict[str, Any]] = []
        self._turns: list[Turn] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages, the system prompt first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages]

    def reset(self) -> None:
        self._messages.clear()

    def save(self, path: Path) -> None:
        """Write the messages as JSON.

        Raises:
            OSError: the file can't be written.
        """
        text = json.dumps(self.messages, ensure_ascii=False, indent=1)
        path.expanduser().write_text(f"{text}\n", encoding="utf-8")

    @property
    def stats(self) -> str:
        if not self._turns:
            return "[no answers yet]"
        prompts, cached, seconds, tokens = (
            sum(getattr(turn, name) for turn in self._turns)
            for name in ("num_prompt_tokens", "num_cached_tokens", "seconds", "num_tokens")
        )
        metrics = RequestMetrics.total([turn.metrics for turn in self._turns])
        return (
            f"[{len(self._turns)} answers: {summary(metrics, tokens, seconds)}, {cached} of "
            f"{prompts} prompt tokens cached]"
        )

    async def answer(self, text: str) -> bool:
        """Print the answer to a message as it is generated, then its stats.

        If the task is cancelled or fails, the partial answer is kept; without any token, the
        message is dropped instead.

        Returns:
            False if the model produced NaN logits.

        Raises:
            ValueError: the template refuses the messages, or the prompt is too long.
            ServiceError: the engine has failed.
        """
        self._messages.append({"role": "user", "content": text})
        try:
            stream = await self._llm.submit_chat(self.messages, self._params)
        except BaseException:
            self._messages.pop()
            raise
        answer = Answer(stream, self._dialect, self._look())
        try:
            async with contextlib.aclosing(stream):
                async for delta in stream:
                    print(answer.push(delta), end="", flush=True)
        except asyncio.CancelledError:
            print("\n[stopped]", flush=True)
            raise
        finally:
            if answer.message is None:
                self._messages.pop()
            else:
                self._messages.append(answer.message)
        turn = answer.turn
        self._turns.append(turn)
        print(f"\n{answer.legend}" if self._color else "")
        print(dim(str(turn)) if self._is_terminal else turn, flush=True)
        if turn.finish_reason == "error":
            print(failure(1, 1), file=sys.stderr)
        return turn.finish_reason != "error"

    def _look(self) -> Look:
        if self._color and self._llm.tokenizer is not None:
            return by_draft(self._llm.tokenizer)
        return by_part() if self._is_terminal else plain
