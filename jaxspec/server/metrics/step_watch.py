"""StepWatch: times of the engine's last steps, traced only while they are requested."""

import asyncio
import contextlib

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.engine.engine import StepTimes
from jaxspec.viz.timeline import StepRow, rows_of

MAX_STEPS = 100
"""Maximum number of steps kept between two calls."""
_IDLE = 10.0  # seconds without a call after which the trace ends


class StepWatch:
    """Trace of an engine that starts at the first call of `last` and ends when calls stop.

    A trace costs a thread that waits for the device at every step.
    """

    def __init__(self, llm: AsyncLLM, *, idle: float = _IDLE):
        """`idle`: seconds without a call after which the trace ends."""
        self._llm, self._idle = llm, idle
        self._watching = contextlib.ExitStack()
        self._steps: list[StepTimes] | None = None  # None while no trace runs
        self._num_dropped = 0
        self._one_at_a_time = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        # Start or end of a trace, in a thread; an engine has one trace at a time.
        self._change: asyncio.Future[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._steps is not None

    async def last(self, count: int) -> list[StepRow]:
        """Return the last `count` recorded steps; the first call starts the trace and returns none.

        Steps of several replicas are not traced, so there are none.

        Raises:
            RuntimeError: the engine is closed, or has another trace.
        """
        if self._llm.num_replicas > 1:
            return []
        async with self._one_at_a_time:
            self._arm()
            if self._change is not None:
                await asyncio.wait({self._change})  # even if the call that began it was cancelled
            if self._steps is None:
                self._change = asyncio.get_running_loop().run_in_executor(None, self._begin)
                await asyncio.shield(self._change)
            assert self._steps is not None
        num_old = max(0, len(self._steps) - MAX_STEPS)
        del self._steps[:num_old]  # safe while the engine's thread appends
        self._num_dropped += num_old
        steps = self._steps.copy()
        first = max(0, len(steps) - count)
        return rows_of(steps, first=first, count=count, num_before=self._num_dropped)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle, self._end)

    def _begin(self) -> None:
        """Start the trace, in a thread that completes even if the call is cancelled."""
        self._steps = self._watching.enter_context(self._llm.trace())

    def _end(self) -> None:
        is_changing = self._change is not None and not self._change.done()
        if is_changing or self._one_at_a_time.locked():
            self._arm()
            return
        self._steps, self._timer, watching = None, None, self._watching.pop_all()
        # Closing blocks until the device has run the traced steps.
        self._change = asyncio.get_running_loop().run_in_executor(None, watching.close)
