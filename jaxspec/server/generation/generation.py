"""Generation: the streams of one request merged into one, with token usage."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from jaxspec.api.async_llm import AsyncStream
from jaxspec.engine.errors import QueueTimeoutError
from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.request import RequestMetrics
from jaxspec.server.http.errors import ApiError
from jaxspec.server.metrics.server_metrics import ServerMetrics


def _failure(finish_reason: str) -> ApiError | None:
    """Return the error for a sample that failed or was aborted; None for others."""
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
    """Token counts of an answer, including its prompts and accepted and rejected drafts."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0

    def as_object(self) -> dict[str, Any]:
        """Return OpenAI's `usage` object."""
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
    """The streams of a request's prompts, merged into one and closed together.

    `deltas` yields `(choice, delta)`. Sample s of prompt p is choice p * n + s.
    """

    def __init__(self, streams: Sequence[AsyncStream], n: int, metrics: ServerMetrics):
        """Merge `streams` of `n` samples each; finished samples are counted in `metrics`."""
        self.streams, self.n = streams, n
        self.usage = Usage(prompt_tokens=sum(len(each.prompt_token_ids) for each in streams))
        self._metrics = metrics

    @property
    def num_choices(self) -> int:
        """Number of samples of all prompts."""
        return len(self.streams) * self.n

    def stream_of(self, choice: int) -> AsyncStream:
        return self.streams[choice // self.n]

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield `(choice, delta)` as tokens are generated; closing it early aborts the request.

        Raises:
            ApiError: a sample failed, or was aborted by the server.
            Exception: raised by the streams.
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
        for stream in self.streams:
            await stream.aclose()

    async def _read(self, stream: AsyncStream) -> AsyncIterator[TextDelta]:
        """Yield a stream's deltas and update usage and metrics."""
        latency, is_first, lengths = self._metrics.latency(), True, list[int]()
        try:
            async for delta in stream:
                if is_first:
                    self.usage.cached_tokens += stream.num_cached_tokens
                    self._metrics.num_cached_tokens += stream.num_cached_tokens
                    is_first = False
                self.usage.completion_tokens += len(delta.token_ids)
                latency.note(delta.index, len(delta.token_ids))
                if delta.finish_reason is not None:
                    self._note_end(delta.finish_reason, delta.metrics)
                    lengths.append(0 if delta.metrics is None else delta.metrics.num_tokens)
                    if len(lengths) == self.n:
                        self._metrics.note_longest(max(lengths))
                yield delta
        except QueueTimeoutError:
            self._metrics.rejections["queue_timeout"] += 1
            raise

    def _note_end(self, finish_reason: str, metrics: RequestMetrics | None) -> None:
        """Count a finished sample; raise ApiError if it failed."""
        self._metrics.note_end(finish_reason)
        if metrics is not None:
            self.usage.accepted_tokens += metrics.num_accepted_tokens
            self.usage.rejected_tokens += metrics.num_draft_tokens - metrics.num_accepted_tokens
        if (error := _failure(finish_reason)) is not None:
            raise error


async def _merged(
    streams: Sequence[AsyncStream], read: Any
) -> AsyncGenerator[tuple[int, TextDelta], None]:
    """Yield `(stream index, delta)` of several streams in order of arrival."""
    came: asyncio.Queue[tuple[int, Any]] = asyncio.Queue(len(streams))

    async def forward(number: int, stream: AsyncStream) -> None:
        try:
            async for delta in read(stream):
                await came.put((number, delta))
            await came.put((number, None))
        except Exception as error:  # raised again by the reader
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
