"""RemoteEngineServer: the engine's side of an `EngineClient` in another process."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.processes.channel import Channel
from jaxspec.engine.engine_thread import MakeSampleStream, Settle
from jaxspec.engine.sample_stream import Receiver, SampleStream, TokenDelta
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Request


class OutputSender(Receiver):
    """Sends the outputs of a request to the process that submitted it."""

    def __init__(
        self,
        number: int,
        engine_server: "RemoteEngineServer",
        samples: Sequence[Sample],
        make_sample_stream: MakeSampleStream,
        settle: Settle,
    ):
        """Send to the process of `engine_server`, which identifies the request by `number`.

        The other arguments are as in `OutputQueue`.
        """
        super().__init__(engine_server.loop, [make_sample_stream(sample) for sample in samples])
        self._number, self._engine_server, self.settle = number, engine_server, settle

    def begin(self) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.loop.call_soon_threadsafe(self._engine_server.add_begun, self._number)

    def receive(self, sample_stream: SampleStream, token_delta: TokenDelta) -> None:
        self.stop_timer()
        self._engine_server.add(self._number, sample_stream.index, token_delta)

    def fail(self, error: Exception) -> None:
        """Send the error after all earlier deltas."""
        self.stop_timer()
        self._engine_server.fail(self._number, error)


class RemoteEngineServer:
    """Submits the requests of one other process to the engine and sends back their outputs."""

    def __init__(
        self, llm: AsyncLLM, channel: Channel, handlers: Mapping[str, Callable[..., Any]] | None
    ):
        """Serve the process at the other end of `channel`, once `run` is called.

        `handlers` handle its further messages.
        """
        self.loop, self.channel = asyncio.get_running_loop(), channel
        self._llm, self._is_gone = llm, False
        self._expected = dict[int, contextlib.ExitStack]()  # in preparation, by number
        self._output_senders = dict[int, OutputSender]()
        self._deltas = list[tuple[int, int, TokenDelta]]()  # unsent: number, sample, delta
        self._begun = list[int]()  # unsent: numbers of requests that have their first row
        channel.handlers = {
            **channel.handlers,
            "expect": self._expect,
            "take_over": self._take_over,
            "settle": self._settle,
            "abort": self._abort,
            "release": self._release,
            "reset_prefix_cache": llm.reset_prefix_cache,
            "start_profile": llm.start_profile,
            "stop_profile": llm.stop_profile,
            **(handlers or {}),
        }

    async def run(self) -> None:
        """Serve until the process is gone, then abort its requests."""
        try:
            await self.channel.run()
        finally:
            self._is_gone = True
            for number in {*self._expected, *self._output_senders}:
                self._abort(number)

    def add(self, number: int, index: int, token_delta: TokenDelta) -> None:
        """Queue a sample's delta; all deltas of one event loop turn are sent in one message."""
        self._send_soon()
        self._deltas.append((number, index, token_delta))

    def add_begun(self, number: int) -> None:
        """Queue the message that a request has its first row; it is sent with the deltas."""
        self._send_soon()
        self._begun.append(number)

    def fail(self, number: int, error: Exception) -> None:
        self._send()
        self._output_senders.pop(number, None)
        self.channel.notify("failed", number, error)

    def _send_soon(self) -> None:
        if not (self._deltas or self._begun):
            self.loop.call_soon(self._send)

    def _send(self) -> None:
        if self._deltas or self._begun:
            deltas, begun, self._deltas, self._begun = self._deltas, self._begun, [], []
            self.channel.notify("deltas", deltas, begun)

    async def _expect(self, number: int) -> None:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._llm.expecting())
            self._expected[number] = entered.pop_all()

    async def _take_over(self, number: int, requests: Sequence[Request]) -> None:
        def make(
            samples: Sequence[Sample], make_sample_stream: MakeSampleStream, settle: Settle
        ) -> OutputSender:
            self._output_senders[number] = OutputSender(
                number, self, samples, make_sample_stream, settle
            )
            return self._output_senders[number]

        for request in requests:
            request.tokens = list(request.prompt)  # the prompt was sent once for all samples
        try:
            # A request that was not expected is counted from here on.
            with self._expected.pop(number, contextlib.nullcontext()):
                await self._llm.take_over(requests, make)
        except BaseException:
            self._output_senders.pop(number, None)
            raise
        if self._is_gone:
            self._abort(number)

    def _settle(self, number: int, index: int, num_tokens: int | None) -> None:
        if (output_sender := self._output_senders.get(number)) is not None:
            output_sender.settle(output_sender.sample_streams[index], num_tokens)

    def _abort(self, number: int) -> None:
        if (expected := self._expected.pop(number, None)) is not None:
            expected.close()
        if (output_sender := self._output_senders.pop(number, None)) is not None:
            self._llm.give_up(output_sender)

    def _release(self, number: int) -> None:
        self._output_senders.pop(number, None)
