"""`AsyncCalls`: calls of tasks of an event loop that queue requests of an engine anywhere."""

import abc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Unpack

from jaxspec.engine.async_stream import AsyncStream
from jaxspec.requests.outputs import Sample, TextDelta
from jaxspec.requests.prompts import Prompt, TokensPrompt, parts_of
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.conversations import Messages, TemplateOptions

_NUM_PREPARING = 4
"""Number of threads that tokenize, render chats and compile."""
Prepared = tuple[str | None, list[Sample]]
"""Text of the prompt, or None for token ids, and its checked samples."""


class MakesSamples(Protocol):
    """Creates samples in worker threads, with the errors of `AsyncCalls.submit`."""

    def one_prompt(self, prompt: Any, /) -> Any:
        """Return the prompt itself, or the element of a list of one prompt."""
        ...

    def prepare_one(
        self, prompt: Any, params: SamplingParams | None, name: str | None, priority: int, /
    ) -> list[Sample]:
        """Return the checked samples of a prompt."""
        ...

    def chat_prompt(self, messages: Any, template: TemplateOptions, /) -> TokensPrompt:
        """Return the rendered and tokenized prompt of a conversation."""
        ...


class AsyncCalls(abc.ABC):
    """Public calls that queue a request; subclasses run it in this process or in another."""

    _maker: MakesSamples
    _pool: ThreadPoolExecutor

    def _begin_calls(self, maker: MakesSamples) -> None:
        self._maker = maker
        self._pool = ThreadPoolExecutor(_NUM_PREPARING, "jaxspec-prepare")

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncStream:
        """Check a prompt and queue a request.

        Args:
            prompt: A text, a list of token ids, or a dict (`TextPrompt` or `TokensPrompt`).
            sampling_params: Parameters; None means `get_default_sampling_params()`.
            request_id: Id for `abort`; None means a number.
            priority: Waiting requests with lower values enter the batch first.

        Returns:
            The stream of the request's deltas.

        Raises:
            ValueError: the prompt or a parameter is invalid; nothing is queued.
            QueueFullError: too many requests or prompt tokens are waiting.
            DrainingError: the engine is draining or closed.
            EngineDeadError: a step has failed.
            RuntimeError: this is a forked child of the engine's process.
        """

        def prepare() -> Prepared:
            return self._prepared(prompt, sampling_params, request_id, priority)

        return await self._submit(prepare)

    async def submit_chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **template: Unpack[TemplateOptions],
    ) -> AsyncStream:
        """Queue a request for the next message of a conversation.

        Args:
            messages: Messages as in `LLM.chat`.
            sampling_params: As in `submit`.
            request_id: As in `submit`.
            priority: As in `submit`.
            cache_salt: Only requests with an equal salt share cached prefixes with this one; None
                shares with all requests without one.
            **template: Template options as in `LLM.chat`.

        Returns:
            The stream of the request's deltas.

        Raises:
            TypeError: an argument is unknown.
            ValueError: as in `LLM.chat` and `submit`; other errors as in `submit`.
        """

        def prepare() -> Prepared:
            prompt = self._maker.chat_prompt(messages, template)
            if cache_salt is not None:
                prompt["cache_salt"] = cache_salt
            return self._prepared(prompt, sampling_params, request_id, priority)

        return await self._submit(prepare)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[TextDelta]:
        """Queue a request at the first `anext` and yield its deltas.

        Closing the generator aborts the request.

        Args:
            prompt: As in `submit`.
            sampling_params: As in `submit`.
            request_id: As in `submit`.
            priority: As in `submit`.

        Yields:
            The deltas of the request.

        Raises:
            ServiceError, ValueError, RuntimeError: as in `submit` and `AsyncStream`.
        """
        stream = await self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority
        )
        async with stream:
            async for delta in stream:
                yield delta

    def _prepared(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> Prepared:
        prompt = self._maker.one_prompt(prompt)
        samples = self._maker.prepare_one(prompt, params, request_id, priority)
        return parts_of(prompt).text, samples

    @abc.abstractmethod
    async def _submit(self, prepare: Callable[[], Prepared]) -> AsyncStream:
        """Prepare samples in a worker thread and queue them."""
