"""A chat conversation in a terminal, with stats of the answers."""

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.commands.answer import Answer, Look, Turn, by_draft, by_part, dim, plain
from jaxspec.commands.figures import failure, summary
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.parsers import PLAIN, parser_for


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
        """Drop all messages except the system prompt."""
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
        """Total stats of all answers, in one line."""
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
