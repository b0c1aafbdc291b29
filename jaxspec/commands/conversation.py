"""Conversation: messages that a model answers in a terminal, and the figures of its answers."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from jaxspec.async_llm import AsyncLLM
from jaxspec.commands.answer import Answer, Look, Turn, by_draft, by_part, dim, plain
from jaxspec.commands.figures import failure, summary
from jaxspec.request import RequestMetrics
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.parsers import parser_for


class Conversation:
    """Messages, oldest first, in OpenAI's form; the template of each turn is given all of them."""

    def __init__(
        self,
        llm: AsyncLLM,
        params: SamplingParams,
        *,
        system: str | None = None,
        color: bool = False,
        is_terminal: bool = False,
    ):
        """Begin one without messages, but for `system`, which says what the model is to be.

        `color`: paint each token by who gave it. `is_terminal`: print reasoning dim, and control
        characters of the model's as what they are.
        """
        self._llm, self._color, self._is_terminal = llm, color, is_terminal
        self._dialect = parser_for(llm.tokenizer.chat_template if llm.tokenizer else None)
        self._params = params.clone()
        if self._dialect.thinks:
            self._params.skip_special_tokens = False  # the reasoning's tags may be such
        self.system = system
        self._messages: list[dict[str, Any]] = []
        self._turns: list[Turn] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All of them, the system's first."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._messages]

    def reset(self) -> None:
        """Forget the messages, but for the system's."""
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
        """The figures of all answers together, in a line."""
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
        """Print the answer to a message as it comes, then its figures; False: the model gave NaN.

        If the task is cancelled or an error comes, what has come stays as the answer; if nothing
        has, the message is forgotten.

        Raises:
            ValueError: the template refuses the messages, or they have become too long.
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
