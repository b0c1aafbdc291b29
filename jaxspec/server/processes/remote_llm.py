"""RemoteLLM: what the routes of an API process take for the engine, which is in another one."""

import asyncio
import contextlib
import copy
import itertools
from collections.abc import Callable
from typing import Any

from jaxspec.arrivals import Arrival, Tap
from jaxspec.async_calls import AsyncCalls, Prepared
from jaxspec.async_errors import EngineDeadError, EngineGoneError, ServiceError
from jaxspec.async_llm import Elsewhere
from jaxspec.async_stream import AsyncStream, Inbox
from jaxspec.conversations import TemplateOptions
from jaxspec.inputs import InputProcessor
from jaxspec.outputs import Sample
from jaxspec.per_prompt import for_one
from jaxspec.prompts import Prompt, TokensPrompt, only_prompt
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.processes.channel import Channel
from jaxspec.server.snapshot import Snapshot
from jaxspec.timeline import StepRow
from jaxspec.tokenizer import Tokenizer


class _Maker:
    """Makes samples; whether the engine has room for them is for its own process to say."""

    def __init__(self, inputs: InputProcessor, default_params: SamplingParams):
        self._inputs, self._default_params = inputs, default_params

    def one_prompt(self, prompt: Any) -> Any:
        return only_prompt(prompt)

    def prepare_one(
        self, prompt: Prompt, params: SamplingParams | None, name: str | None, priority: int
    ) -> list[Sample]:
        given = for_one(params, self._default_params, name, priority)
        (samples,) = self._inputs.process([prompt], *given)
        return samples

    def chat_prompt(self, messages: Any, template: TemplateOptions) -> TokensPrompt:
        return self._inputs.chat(messages, template)


class _Inbox(Inbox):
    """An inbox whose request has a number, by which both processes know it."""

    def __init__(self, number: int, samples: list[Sample], channel: Channel):
        def settle(tap: Tap, num_tokens: int | None) -> None:
            channel.tell("settle", number, tap.index, num_tokens)

        super().__init__(asyncio.get_running_loop(), samples, _tap_of, settle)
        self.number = number


def _tap_of(sample: Sample) -> Tap:
    """A tap that hands nothing on: the engine's process has another one."""
    return Tap(sample, lambda tap, arrival: None)


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
        self._inboxes = dict[int, _Inbox]()  # of requests that the engine has
        self._queueing = set[asyncio.Task[tuple[str | None, _Inbox]]]()
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
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.fail(copy.copy(error))

    async def _submit(self, prepare: Callable[[], Prepared]) -> AsyncStream:
        # Queueing goes on if the caller is cancelled: only what the engine has can be aborted.
        queueing = asyncio.ensure_future(self._queue(prepare))
        self._queueing.add(queueing)
        queueing.add_done_callback(self._queueing.discard)
        try:
            prompt, inbox = await asyncio.shield(queueing)
        except asyncio.CancelledError:
            queueing.add_done_callback(self._drop)
            raise
        return AsyncStream(inbox, prompt, self._abort, keeps=self)

    def _drop(self, queueing: asyncio.Task[tuple[str | None, _Inbox]]) -> None:
        """Nobody waits for this request any more."""
        if not queueing.cancelled() and queueing.exception() is None:
            _, inbox = queueing.result()
            inbox.close()
            self._end(inbox)

    async def _queue(self, prepare: Callable[[], Prepared]) -> tuple[str | None, _Inbox]:
        number = next(self._numbers)
        await self._ask("expect", number)
        try:
            prompt, samples = await self._loop.run_in_executor(self._pool, prepare)
            inbox = self._inboxes[number] = _Inbox(number, samples, self._channel)
            requests = [tap.request for tap in inbox.taps]
            for request in requests:
                request.tokens = []  # the prompt's: once is enough on the way
            await self._ask("take_over", number, requests)
        except BaseException:
            self._inboxes.pop(number, None)
            self._channel.tell("abort", number)
            raise
        return prompt, inbox

    async def _ask(self, name: str, *args: Any) -> Any:
        if self.error is not None:
            raise copy.copy(self.error)  # each with a traceback of its own
        try:
            return await self._channel.ask(name, *args)
        except ConnectionError as error:
            raise EngineGoneError from error

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
                self._end(inbox)

    def _failed(self, number: int, error: Exception) -> None:
        """The engine gave a request up."""
        if isinstance(error, EngineDeadError):
            self.error = self.error or error
        if (inbox := self._inboxes.pop(number, None)) is not None:
            inbox.fail(copy.copy(error))

    def _end(self, inbox: _Inbox) -> None:
        """Nothing comes any more. What nobody read to its end is settled by an abort."""
        if self._inboxes.pop(inbox.number, None) is not None:
            was_read = not (inbox.is_closed or inbox.error)
            self._channel.tell("let_go" if was_read else "abort", inbox.number)

    def _abort(self, inbox: Inbox) -> None:
        """Any thread may call, as the garbage collector does."""
        assert isinstance(inbox, _Inbox)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._end, inbox)
