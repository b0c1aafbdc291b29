"""StepWatch: when the engine's last steps were planned and run, while somebody asks for that."""

import asyncio
import contextlib

from jaxspec.async_llm import AsyncLLM
from jaxspec.engine import StepTimes
from jaxspec.timeline import StepRow, rows_of

MAX_STEPS = 100
"""Steps that are kept between two questions."""
_IDLE = 10.0  # seconds without a question after which nobody watches


class StepWatch:
    """An engine's trace, which begins with the first question and ends when no more come.

    A trace costs a thread that waits for the device with every step.
    """

    def __init__(self, llm: AsyncLLM, *, idle: float = _IDLE):
        """Watch `llm` when asked; `idle`: seconds without a question that end it."""
        self._llm, self._idle = llm, idle
        self._watching = contextlib.ExitStack()
        self._steps: list[StepTimes] | None = None  # None: nobody watches
        self._num_dropped = 0
        self._one_at_a_time = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        # The beginning or end of a trace, in a thread: an engine has one trace at a time.
        self._change: asyncio.Future[None] | None = None

    @property
    def is_on(self) -> bool:
        """Whether steps are noted."""
        return self._steps is not None

    async def last(self, count: int) -> list[StepRow]:
        """The last `count` steps that were noted; none for the first question, which begins it.

        Raises:
            RuntimeError: somebody else traces the engine, or it is closed.
        """
        async with self._one_at_a_time:
            self._arm()
            if self._change is not None:
                await asyncio.wait({self._change})  # also one whose question was cancelled
            if self._steps is None:
                self._change = asyncio.get_running_loop().run_in_executor(None, self._begin)
                await asyncio.shield(self._change)
            assert self._steps is not None
        num_old = max(0, len(self._steps) - MAX_STEPS)
        del self._steps[:num_old]  # the engine's thread may add one meanwhile, at the end
        self._num_dropped += num_old
        steps = self._steps.copy()
        first = max(0, len(steps) - count)
        return rows_of(steps, first=first, count=count, num_before=self._num_dropped)

    def _arm(self) -> None:
        """Begin to count idle seconds anew."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._idle, self._end)

    def _begin(self) -> None:
        """In a thread, which goes on if the question is cancelled."""
        self._steps = self._watching.enter_context(self._llm.trace())

    def _end(self) -> None:
        is_changing = self._change is not None and not self._change.done()
        if is_changing or self._one_at_a_time.locked():
            self._arm()
            return
        self._steps, self._timer, watching = None, None, self._watching.pop_all()
        # It waits until the device is done with what it watches.
        self._change = asyncio.get_running_loop().run_in_executor(None, watching.close)
