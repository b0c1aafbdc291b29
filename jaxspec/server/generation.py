"""Generation: what a request asked of the engine, as one stream of pieces, and what it used up."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from jaxspec.async_errors import QueueTimeoutError
from jaxspec.async_llm import AsyncStream
from jaxspec.outputs import TextDelta
from jaxspec.request import RequestMetrics
from jaxspec.server.errors import ApiError
from jaxspec.server.figures import Figures


def _failure(finish_reason: str) -> ApiError | None:
    """The error of a sample that did not come to an end of its own; None for one that did."""
    if finish_reason == "error":
        return ApiError(
            500,
            "The model gave no finite logits for this request, and would again: its weights may be "
            "damaged, or their values too large for the dtype.",
            headers={"x-should-retry": "false"},
        )
    if finish_reason == "abort":
        return ApiError(
            503,
            "The server ended this request before it was done. Send it again.",
            headers={"retry-after": "8"},
        )
    return None


@dataclasses.dataclass
class Usage:
    """Tokens of an answer; those of its prompts, and what became of drafts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0

    def as_object(self) -> dict[str, Any]:
        """OpenAI's object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning_tokens,
                "accepted_prediction_tokens": self.accepted_tokens,
                "rejected_prediction_tokens": self.rejected_tokens,
            },
        }


class Generation:
    """The streams of a request's prompts, read as one and ended together.

    Iterating gives `(choice, delta)`. The samples of prompt p are the choices p * n to p * n + n-1.
    """

    def __init__(self, streams: Sequence[AsyncStream], n: int, figures: Figures):
        """Read `streams`, each of which has `n` samples."""
        self.streams, self.n = streams, n
        self.usage = Usage(prompt_tokens=sum(len(each.prompt_token_ids) for each in streams))
        self._figures = figures

    @property
    def num_choices(self) -> int:
        """Samples of all prompts."""
        return len(self.streams) * self.n

    def stream_of(self, choice: int) -> AsyncStream:
        """The stream of the prompt that a choice goes on with."""
        return self.streams[choice // self.n]

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """The pieces as they come. Leaving it early ends what runs.

        Raises:
            ApiError: a sample failed, or was ended by the server.
            Exception: as the streams raise.
        """
        try:
            if len(self.streams) == 1:
                async for delta in self._read(self.streams[0]):
                    yield delta.index, delta
            else:
                async with contextlib.aclosing(_merged(self.streams, self._read)) as merged:
                    async for number, delta in merged:
                        yield number * self.n + delta.index, delta
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """End what runs."""
        for stream in self.streams:
            await stream.aclose()

    async def _read(self, stream: AsyncStream) -> AsyncIterator[TextDelta]:
        """A stream's pieces, counted."""
        latency, is_first, lengths = self._figures.latency(), True, list[int]()
        try:
            async for delta in stream:
                if is_first:
                    self.usage.cached_tokens += stream.num_cached_tokens
                    self._figures.num_cached_tokens += stream.num_cached_tokens
                    is_first = False
                self.usage.completion_tokens += len(delta.token_ids)
                latency.note(delta.index, len(delta.token_ids))
                if delta.finish_reason is not None:
                    self._note_end(delta.finish_reason, delta.metrics)
                    lengths.append(0 if delta.metrics is None else delta.metrics.num_tokens)
                    if len(lengths) == self.n:
                        self._figures.note_longest(max(lengths))
                yield delta
        except QueueTimeoutError:
            self._figures.rejections["queue_timeout"] += 1
            raise

    def _note_end(self, finish_reason: str, metrics: RequestMetrics | None) -> None:
        """Count a sample that ended; raise if it failed."""
        self._figures.note_end(finish_reason, metrics)
        if metrics is not None:
            self.usage.accepted_tokens += metrics.num_accepted_tokens
            self.usage.rejected_tokens += metrics.num_draft_tokens - metrics.num_accepted_tokens
        if (error := _failure(finish_reason)) is not None:
            raise error


async def _merged(
    streams: Sequence[AsyncStream], read: Any
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """The pieces of several streams, each with its stream's number, in the order they come."""
    came: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(streams))

    async def forward(number: int, stream: AsyncStream) -> None:
        try:
            async for delta in read(stream):
                await came.put((number, delta))
            await came.put((number, None))
        except Exception as error:  # raised where the pieces are read
            await came.put((number, error))

    tasks = [asyncio.create_task(forward(*each)) for each in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            number, delta = await came.get()
            if isinstance(delta, Exception):
                raise delta
            if delta is None:
                left -= 1
            else:
                yield number, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
