"""Desk: where the engine's process serves one API process."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from jaxspec.arrivals import Arrival, Receiver, Tap
from jaxspec.async_llm import AsyncLLM
from jaxspec.engine_thread import MakeTap, Settle
from jaxspec.outputs import Sample
from jaxspec.request import Request
from jaxspec.server.processes.channel import Channel
from jaxspec.server.snapshot import Snapshot
from jaxspec.timeline import StepRow


class Outbox(Receiver):
    """Sends what comes for a request to the process that made it."""

    def __init__(
        self,
        number: int,
        desk: "Desk",
        samples: Sequence[Sample],
        make_tap: MakeTap,
        settle: Settle,
    ):
        """Send to the process of `desk`, where the request has this `number`.

        The rest is as in `Inbox`.
        """
        super().__init__(desk.loop, [make_tap(sample) for sample in samples])
        self._number, self._desk, self.settle = number, desk, settle

    def receive(self, tap: Tap, arrival: Arrival) -> None:
        """Let it go with what else the step brought."""
        self.stop_timer()
        self._desk.add(self._number, tap.index, arrival)

    def fail(self, error: Exception) -> None:
        """Say so behind what came before."""
        self.stop_timer()
        self._desk.fail(self._number, error)


class Desk:
    """Takes the requests of one API process over, and sends it what comes for them."""

    def __init__(
        self,
        llm: AsyncLLM,
        channel: Channel,
        snapshot: Callable[[], Awaitable[Snapshot]],
        last_steps: Callable[[int], Awaitable[list[StepRow]]],
    ):
        """Serve the process at the other end of `channel`, from `run` on."""
        self.loop, self.channel = asyncio.get_running_loop(), channel
        self.ready = asyncio.Event()  # its port is open
        self._llm, self._is_gone = llm, False
        self._expected = dict[int, contextlib.ExitStack]()  # requests that are made ready there
        self._outboxes = dict[int, Outbox]()
        self._came = list[tuple[int, int, Arrival]]()  # and was not sent yet
        channel.handlers = {
            "ready": self.ready.set,
            "expect": self._expect,
            "take_over": self._take_over,
            "settle": self._settle,
            "abort": self._abort,
            "let_go": self._let_go,
            "snapshot": snapshot,
            "last_steps": last_steps,
        }

    async def run(self) -> None:
        """Serve until the process is gone; then its requests end."""
        try:
            await self.channel.run()
        finally:
            self._is_gone = True
            for number in {*self._expected, *self._outboxes}:
                self._abort(number)

    def add(self, number: int, index: int, arrival: Arrival) -> None:
        """What came for a sample goes with what else comes in this turn of the event loop."""
        if not self._came:
            self.loop.call_soon(self._send)
        self._came.append((number, index, arrival))

    def fail(self, number: int, error: Exception) -> None:
        """A request gets nothing more."""
        self._send()
        self._outboxes.pop(number, None)
        self.channel.tell("failed", number, error)

    def _send(self) -> None:
        if self._came:
            came, self._came = self._came, []
            self.channel.tell("came", came)

    async def _expect(self, number: int) -> None:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._llm.expecting())
            self._expected[number] = entered.pop_all()

    async def _take_over(self, number: int, requests: Sequence[Request]) -> None:
        def make(samples: Sequence[Sample], make_tap: MakeTap, settle: Settle) -> Outbox:
            self._outboxes[number] = Outbox(number, self, samples, make_tap, settle)
            return self._outboxes[number]

        for request in requests:
            request.tokens = list(request.prompt)  # which came once for all samples
        try:
            with self._expected.pop(number):
                await self._llm.take_over(requests, make)
        except BaseException:
            self._outboxes.pop(number, None)
            raise
        if self._is_gone:
            self._abort(number)

    def _settle(self, number: int, index: int, num_tokens: int | None) -> None:
        if (outbox := self._outboxes.get(number)) is not None:
            outbox.settle(outbox.taps[index], num_tokens)

    def _abort(self, number: int) -> None:
        if (expected := self._expected.pop(number, None)) is not None:
            expected.close()
        if (outbox := self._outboxes.pop(number, None)) is not None:
            self._llm.give_up(outbox)

    def _let_go(self, number: int) -> None:
        self._outboxes.pop(number, None)
