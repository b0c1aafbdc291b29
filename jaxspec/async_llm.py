"""AsyncLLM: text in, text out, for tasks of an event loop; the engine has a thread of its own."""

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, Unpack

from jaxspec.admission import Admission
from jaxspec.async_errors import DrainingError, QueueTimeoutError
from jaxspec.async_stream import AsyncStream, Inbox
from jaxspec.checks import integer, real, shown
from jaxspec.config import StepShapes
from jaxspec.conversations import Messages, TemplateOptions
from jaxspec.engine import StepTimes
from jaxspec.engine_thread import EngineThread
from jaxspec.llm_engine import LLMEngine
from jaxspec.metrics import Metric, kv_cache_usage
from jaxspec.outputs import Sample, TextDelta
from jaxspec.process import check_process
from jaxspec.prompts import Prompt, parts_of
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer

_NUM_PREPARING = 4
"""Threads that tokenize, write chats out and compile, beside the engine's and the loop's."""
_Prepared = tuple[str | None, list[Sample]]


class AsyncLLM:
    """A model for many callers in one process, each a task of an event loop.

    The engine runs in a thread of its own, and prompts are made ready in a few others, so the event
    loop never waits for either. `async with AsyncLLM(...) as llm:` closes it in the end.

    A step that fails ends every stream with `EngineDeadError`, and nothing is served after that.
    Whether the device can be trusted is for whoever runs the process to decide. `is_healthy` tells.

    `max_num_queued_reqs`, `max_num_queued_tokens`: how many requests, and tokens of their prompts,
    may wait for a row; None: any number. More are refused with `QueueFullError`.
    `queue_timeout`: seconds that a request may wait for a row; None: any time.
    `stream_interval`: tokens between two pieces of a stream, at least; the first token and the end
    come at once, and a request with stop strings passes it over.
    `options`: those of `LLM`.

    Raises:
        ValueError: a limit breaks its rule; and as `LLM`.
        FileNotFoundError, TypeError, RuntimeError: as `LLM`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        queue_timeout: float | None = None,
        stream_interval: int = 1,
        **options: Any,
    ):
        """Load the model, and start its thread; programs are compiled when first needed."""
        admission = Admission(max_num_queued_reqs, max_num_queued_tokens)
        if queue_timeout is not None and not real(queue_timeout) > 0:
            raise ValueError(
                f"queue_timeout must be seconds above 0, got {shown(queue_timeout)}; None is no "
                "limit."
            )
        interval = integer("stream_interval", stream_interval, 1)
        self._queue_timeout, self._admission = queue_timeout, admission
        self._engine = LLMEngine(model, **options)
        self._process = os.getpid()
        self._thread = EngineThread(self._engine.session, admission, interval)
        self._pool = ThreadPoolExecutor(_NUM_PREPARING, "jaxspec-prepare")
        # The thread does not refer to the AsyncLLM: one that is lost is closed.
        weakref.finalize(self, self._thread.stop).atexit = False

    async def __aenter__(self) -> Self:
        """The AsyncLLM itself."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close it."""
        await self.close()

    # Requests.

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

        def prepare() -> _Prepared:
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

        def prepare() -> _Prepared:
            prompt = self._engine.chat_prompt(messages, template)
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

    async def abort(self, request_id: str) -> None:
        """End the requests of this id that were submitted before; their streams end with "abort".

        A request that has ended, or never was, is passed over.
        """
        check_process(self._process)
        self._thread.abort_by_id(str(request_id))

    def _prepared(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str | None, priority: int
    ) -> _Prepared:
        prompt = self._engine.one_prompt(prompt)
        samples = self._engine.prepare_one(prompt, params, request_id, priority)
        return parts_of(prompt).text, samples

    async def _submit(self, prepare: Callable[[], _Prepared]) -> AsyncStream:
        check_process(self._process)
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        with self._admission.preparing():
            try:
                prompt, samples = await loop.run_in_executor(self._pool, prepare)
            except (TypeError, ValueError):
                raise
            except Exception:
                self._admission.check_open()  # or this is why it failed
                raise
            inbox = self._thread.submit(loop, samples)
        if self._queue_timeout is not None:
            end = arrived + self._queue_timeout
            inbox.timer = loop.call_at(end, self._expire, inbox, self._queue_timeout)
        return AsyncStream(inbox, prompt, self._thread.abort, keeps=self)

    def _expire(self, inbox: Inbox, seconds: float) -> None:
        if not inbox.has_begun:
            inbox.fail(QueueTimeoutError(seconds))
            self._thread.abort(inbox)

    # Its life.

    async def warm_up(self, samplers: Any = None) -> None:
        """`LLM.warm_up`, while the event loop goes on; the engine serves nobody meanwhile."""
        check_process(self._process)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._engine.warm_up, samplers)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests, and wait for the others to end; after `timeout` seconds abort them.

        Whether all came to their own ends.
        """
        check_process(self._process)
        idle = asyncio.wrap_future(self._admission.drain())
        done, _ = await asyncio.wait({idle}, timeout=timeout)
        if not done:
            self._thread.abort(*self._admission.close(DrainingError))
            await idle
        return bool(done) and self._thread.error is None

    async def close(self) -> None:
        """End what runs with "abort" and give the device's memory back; later calls are refused."""
        check_process(self._process)
        self._thread.stop()
        await asyncio.wrap_future(self._thread.ended)
        self._pool.shutdown(wait=False)

    # What it is, and what it does.

    @property
    def is_healthy(self) -> bool:
        """Whether it serves requests: no step has failed, and it is not closed."""
        return self._thread.is_running

    @property
    def error(self) -> BaseException | None:
        """What a step failed with, if one did."""
        return self._thread.error

    @property
    def num_running(self) -> int:
        """Samples that have a row."""
        return len(self._engine.session.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that had no row yet, those that are being tokenized included."""
        return self._admission.num_waiting

    @property
    def kv_cache_usage(self) -> float:
        """The share of pages that requests hold, in [0, 1]."""
        return kv_cache_usage(self._engine.session.scheduler)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, if it has one."""
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        """The model as it was given: a hub id, or a folder; the embedded model's folder's name."""
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self._engine.shapes.max_model_len

    @property
    def shapes(self) -> StepShapes:
        """The sizes that programs were made for, and how many pages there are."""
        return self._engine.shapes

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what a call without parameters uses, by the option `generation_config`."""
        return self._engine.get_default_sampling_params()

    def metrics(self) -> dict[str, Any]:
        """As `LLM.metrics`, and `num_running`, `num_waiting` and `kv_cache_usage`."""
        return {
            **self._engine.metrics(),
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "kv_cache_usage": self.kv_cache_usage,
        }

    def trace(self) -> AbstractContextManager[list[StepTimes]]:
        """As `LLM.trace`. To enter it waits for a step, so let another thread do that."""
        return self._engine.trace()

    def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`: the figures that vLLM has too, under its names."""
        return self._engine.get_metrics()
