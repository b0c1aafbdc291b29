"""`AsyncCalls`: calls of tasks of an event loop that queue requests of an engine anywhere."""

import abc
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, Unpack

from jaxspec.api.fair_pool import FairPool
from jaxspec.api.inputs import InputProcessor
from jaxspec.engine.async_stream import AsyncStream
from jaxspec.options.vllm_options import check_call
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.outputs import RequestOutput, Sample
from jaxspec.requests.prompts import Prompt, check_salt
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.text.conversations import Messages, TemplateOptions
from jaxspec.text.template_process import NUM_PROCESSES
from jaxspec.text.tokenizer import Tokenizer

EngineCall = Literal["reset_prefix_cache", "start_profile", "stop_profile"]
"""Calls of `LLMEngine` that tasks and API processes may make."""
Prepare = Callable[[], Sequence[Sample]]
"""Returns the checked samples of a prompt; called in a worker thread."""
_Result = TypeVar("_Result")


class WorkerSpec(NamedTuple):
    """Picklable specification for another process that creates requests for this engine.

    Attributes:
        make_inputs: Factory of the process's `InputProcessor`.
        model_name: The model as it was given.
        shapes: Sizes of the engine's programs.
        limits: Limits of its scheduler.
        num_replicas: Number of engines.
    """

    make_inputs: Callable[[], InputProcessor]
    model_name: str
    shapes: StepShapes
    limits: SchedulerLimits
    num_replicas: int = 1


class AsyncCalls(abc.ABC):
    """Public calls that queue a request; subclasses run it in this process or in another.

    Attributes:
        tokenizer: The model's tokenizer; None if it has none.
        model_name: The model as it was given, or the folder name of the embedded model.
        shapes: Sizes of the engine's programs, including the number of pages.
        limits: Limits of the engine's scheduler.
        max_model_len: Most tokens of a prompt with its output.
        num_replicas: Number of engines, each with these shapes and limits.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        model_name: str,
        shapes: StepShapes,
        limits: SchedulerLimits,
        num_replicas: int = 1,
    ):
        """Create samples with `inputs`, for engines with `shapes` and `limits`."""
        self._inputs, self.model_name = inputs, model_name
        self.shapes, self.limits, self.num_replicas = shapes, limits, num_replicas
        self.tokenizer, self.max_model_len = inputs.tokenizer, shapes.max_model_len
        self._pool = FairPool(NUM_PROCESSES, "jaxspec-prepare")

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the parameters of calls without any (option `generation_config`)."""
        return self._inputs.default_params.clone()

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
        process = self._inputs.process_one
        return await self._submit(
            functools.partial(process, prompt, sampling_params, request_id, priority)
        )

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

        def prepare() -> list[Sample]:
            prompt = self._inputs.chat(messages, template)
            if cache_salt is not None:
                prompt = dataclasses.replace(prompt, cache_salt=check_salt(cache_salt))
            return self._inputs.process_one(prompt, sampling_params, request_id, priority)

        return await self._submit(prepare, is_long=template.get("chat_template") is not None)

    async def prepare(self, call: Callable[[], _Result], *, is_long: bool = False) -> _Result:
        """Run other work on a request in the threads that tokenize prompts and render chats.

        Args:
            call: The call.
            is_long: As in `FairPool.run`.

        Returns:
            Its result.

        Raises:
            RuntimeError: this object is closed.
            Exception: raised by `call`.
        """
        return await self._pool.run(call, is_long=is_long)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Queue a request at the first `anext` and yield its outputs, as in vLLM.

        Closing the generator aborts the request. `submit` returns the stream of deltas below it.

        Args:
            prompt: As in `submit`.
            sampling_params: As in `submit`; `output_kind` selects what an output has: all so far
                (CUMULATIVE, the default), what is new (DELTA), or all of it once (FINAL_ONLY).
            request_id: As in `submit`.
            priority: As in `submit`.
            **others: Arguments of vLLM without a counterpart, such as `lora_request=None`.

        Yields:
            The output after the tokens that have arrived since the last one.

        Raises:
            TypeError: an argument is unknown.
            ServiceError, ValueError, RuntimeError: as in `submit` and `AsyncStream`, or a value
                of `others` asks for something.
        """
        check_call("generate", others)
        stream = await self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority
        )
        async with stream, contextlib.aclosing(stream.outputs()) as outputs:
            async for output in outputs:
                yield output

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            ValueError: the model has no tokenizer.
        """
        return self._inputs.require_tokenizer("get_tokenizer()")

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes, as `LLM.reset_prefix_cache` does.

        Raises:
            RuntimeError: as in `LLM.reset_prefix_cache`.
        """
        return await self._control("reset_prefix_cache")

    async def start_profile(self) -> None:
        """Start a profile, as `LLM.start_profile` does.

        Raises:
            ValueError, RuntimeError: as in `LLM.start_profile`.
        """
        await self._control("start_profile")

    async def stop_profile(self) -> None:
        """End the profile and write it, as `LLM.stop_profile` does.

        Raises:
            ValueError, RuntimeError: as in `LLM.stop_profile`.
        """
        await self._control("stop_profile")

    @property
    @abc.abstractmethod
    def is_healthy(self) -> bool:
        """True if no step has failed and it is not closed."""

    @property
    def is_ready(self) -> bool:
        """True if new requests are taken: healthy, and not all replicas are being restarted."""
        return self.is_healthy

    @abc.abstractmethod
    async def _control(self, call: EngineCall) -> Any:
        """Return the result of a call of the engine, made where the engine is."""

    @abc.abstractmethod
    async def _submit(self, prepare: Prepare, *, is_long: bool = False) -> AsyncStream:
        """Prepare samples in a worker thread and queue them; `is_long` as in `FairPool.run`."""
