"""AsyncCalls: how tasks of an event loop ask an engine, wherever it runs."""

import abc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, Unpack

from jaxspec.async_stream import AsyncStream
from jaxspec.conversations import Messages, TemplateOptions
from jaxspec.outputs import Sample, TextDelta
from jaxspec.prompts import Prompt, TokensPrompt, parts_of
from jaxspec.sampling_params import SamplingParams

_NUM_PREPARING = 4
"""Threads that tokenize, write chats out and compile, beside the engine's and the loop's."""
Prepared = tuple[str | None, list[Sample]]
"""A prompt's text, if it came as one, and its checked samples."""


class MakesSamples(Protocol):
    """What makes samples of prompts, in threads; it raises as `AsyncCalls.submit` does."""

    def one_prompt(self, prompt: Any, /) -> Any:
        """The prompt of a call that takes one alone; it may come as a list of one."""
        ...

    def prepare_one(
        self, prompt: Any, params: SamplingParams | None, name: str | None, priority: int, /
    ) -> list[Sample]:
        """The samples of one prompt."""
        ...

    def chat_prompt(self, messages: Any, template: TemplateOptions, /) -> TokensPrompt:
        """The prompt of one conversation, with its text."""
        ...


class AsyncCalls(abc.ABC):
    """The calls that queue a request; a subclass says who makes its samples and who runs them."""

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
        """Queue a request; the stream of its pieces. What it waits for is a check of the prompt.

        `prompt` is a text, token ids or a dict, `sampling_params` None are
        `get_default_sampling_params()`, and of requests that wait those of lower `priority` come
        first. `request_id` is what `abort` takes; None: a number.

        Raises:
            ValueError: a prompt or parameter breaks a rule. Nothing is queued then.
            QueueFullError: too many wait.
            DrainingError: it drains, or is closed.
            EngineDeadError: a step has failed.
            RuntimeError: this is a forked child of its process.
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
        """`submit` for the next message of a conversation; `template` as in `LLM.chat`.

        `cache_salt`: as `TextPrompt`'s; None: anybody may share what is computed of it.

        Raises:
            TypeError: there is no such argument.
            ValueError: as in `LLM.chat`; and as in `submit`, like all others.
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
        """The pieces of what `submit` queues. The first `anext` queues it; leaving ends it.

        Raises:
            ServiceError, ValueError, RuntimeError: as in `submit`, and as `AsyncStream`.
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
        """Have a thread `prepare` samples, and queue them."""
