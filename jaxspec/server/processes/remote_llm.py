"""RemoteLLM: what the routes of an API process take for the engine, which is in another one."""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxspec.arrivals import Arrival, Tap
from jaxspec.async_calls import AsyncCalls, Prepared
from jaxspec.async_errors import EngineDeadError, ServiceError
from jaxspec.async_llm import Elsewhere
from jaxspec.async_stream import AsyncStream, Inbox
from jaxspec.checks import INT64_MAX, integer
from jaxspec.conversations import TemplateOptions
from jaxspec.inputs import InputProcessor
from jaxspec.outputs import Sample
from jaxspec.per_prompt import params_of
from jaxspec.prompts import Prompt, TokensPrompt, only_prompt
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.channel import Channel
from jaxspec.server.snapshot import Snapshot
from jaxspec.timeline import StepRow
from jaxspec.tokenizer import Tokenizer


class Brief(NamedTuple):
    """What an API process is told when it starts."""

    options: ServerOptions
    engine: Elsewhere


class _Maker:
    """Makes samples; whether the engine has room for them is for its own process to say."""

    def __init__(self, inputs: InputProcessor, default_params: SamplingParams):
        self._inputs, self._default_params = inputs, default_params

    def one_prompt(self, prompt: Any) -> Any:
        return only_prompt(prompt)

    def prepare_one(
        self, prompt: Prompt, params: SamplingParams | None, name: str | None, priority: int
    ) -> list[Sample]:
        checked = params_of(params, 1, self._default_params)
        names = None if name is None else [name]
        priority = integer("priority", priority, -INT64_MAX)
        (samples,) = self._inputs.process([prompt], checked, names, priority)
        return samples

    def chat_prompt(self, messages: Any, template: TemplateOptions) -> TokensPrompt:
        return self._inputs.chat(messages, template)


class RemoteLLM(AsyncCalls):
    """An engine behind a channel. Prompts become tokens and tokens text here, in this process.

    It looks to the routes as an `AsyncLLM` does. It is a `Watch`, too.
    """

    def __init__(self, engine: Elsewhere, channel: Channel):
        """Speak to the engine's process over `channel`, which somebody runs."""
        inputs = engine.make_inputs()
        self._begin_calls(_Maker(inputs, engine.default_params))
        self.tokenizer: Tokenizer | None = inputs.tokenizer
        self.model_name, self.shapes = engine.model_name, engine.shapes
        self.max_model_len = engine.shapes.max_model_len
        self.error: ServiceError | None = None  # why nothing is served any more
        self._default_params, self._channel = engine.default_params, channel
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._inboxes = dict[int, Inbox]()  # of requests that the engine has
        channel.handlers = {**channel.handlers, "came": self._came, "failed": self._failed}

    @property
    def is_healthy(self) -> bool:
        """Whether it serves requests, as far as is known here."""
        return self.error is None

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what a request without parameters uses."""
        return self._default_params.clone()

    async def snapshot(self) -> Snapshot:
        """The figures of the engine and of all API processes."""
        return await self._ask("snapshot")

    async def last_steps(self, count: int) -> list[StepRow]:
        """As `StepWatch.last`."""
        return await self._ask("last_steps", count)

    def end(self, error: ServiceError) -> None:
        """Nothing is served any more: every stream ends with `error`."""
        self.error = self.error or error
        for inbox in self._inboxes.values():
            inbox.fail(error)
        self._inboxes.clear()

    async def _submit(self, prepare: Callable[[], Prepared]) -> AsyncStream:
        if self.error is not None:
            raise self.error
        loop = self._loop
        prompt, samples = await loop.run_in_executor(self._pool, prepare)
        number = next(self._numbers)
        settle = functools.partial(self._settle, number)
        inbox = Inbox(loop, samples, _tap_of, settle)
        self._inboxes[number] = inbox
        abort = functools.partial(self._abort, number)
        # It goes on if this task is cancelled: only behind its answer is there what can be ended.
        asking = asyncio.ensure_future(
            self._ask("take_over", number, [tap.request for tap in inbox.taps])
        )
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(functools.partial(self._drop, number))
            raise
        except Exception:
            self._inboxes.pop(number, None)
            raise
        return AsyncStream(inbox, prompt, abort, keeps=self)

    async def _ask(self, name: str, *args: Any) -> Any:
        try:
            return await self._channel.ask(name, *args)
        except ConnectionError as error:
            raise self.error or EngineDeadError(error) from error

    def _came(self, arrivals: list[tuple[int, int, Arrival]]) -> None:
        """What a step brought."""
        for number, index, arrival in arrivals:
            inbox = self._inboxes.get(number)
            if inbox is None:
                continue
            tap = inbox.taps[index]
            inbox.receive(tap, arrival)
            tap.is_over = bool(arrival.finish or tap.reader.request.finish)  # by a stop string
            if tap.is_over and all(each.is_over for each in inbox.taps):
                del self._inboxes[number]
                self._channel.tell("let_go", number)

    def _failed(self, number: int, error: Exception) -> None:
        """The engine gave a request up."""
        if (inbox := self._inboxes.pop(number, None)) is not None:
            inbox.fail(error)

    def _settle(self, number: int, tap: Tap, num_tokens: int | None) -> None:
        self._channel.tell("settle", number, tap.index, num_tokens)

    def _abort(self, number: int, inbox: Inbox) -> None:
        """Any thread may call, as the garbage collector does."""
        del inbox
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._abort_here, number)

    def _drop(self, number: int, asked: asyncio.Future[None]) -> None:
        """A request was queued, or refused, behind the task that wanted it."""
        if asked.cancelled() or asked.exception() is not None:
            self._inboxes.pop(number, None)
        else:
            self._abort_here(number)

    def _abort_here(self, number: int) -> None:
        if self._inboxes.pop(number, None) is not None:
            self._channel.tell("abort", number)


def _tap_of(sample: Sample) -> Tap:
    """A tap that hands nothing on: the engine's process has another one."""
    return Tap(sample, lambda tap, arrival: None)
