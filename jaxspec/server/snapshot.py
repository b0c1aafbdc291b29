"""Snapshot: all figures of a server at one moment, and who takes it."""

import asyncio
import time
from typing import Any, NamedTuple, Protocol

from jaxspec.async_llm import AsyncLLM
from jaxspec.metrics import Metric
from jaxspec.server.figures import Figures
from jaxspec.server.step_watch import StepWatch
from jaxspec.timeline import StepRow


class Snapshot(NamedTuple):
    """What the engine and the server counted until now."""

    is_healthy: bool
    engine: dict[str, Any]  # as `AsyncLLM.metrics`
    by_vllm: list[Metric]  # as `AsyncLLM.get_metrics`
    requests: Figures  # those of all API processes
    loop_lag: float  # seconds; the largest of all processes' event loops


class Watch(Protocol):
    """Looks at the engine for the routes."""

    async def snapshot(self) -> Snapshot:
        """The figures as they are now."""
        ...

    async def last_steps(self, count: int) -> list[StepRow]:
        """As `StepWatch.last`."""
        ...


class LocalWatch:
    """Looks at an engine in this process."""

    def __init__(self, llm: AsyncLLM, figures: Figures):
        """Tell of `llm`, and of requests what `figures` count."""
        self._llm, self._figures = llm, figures
        self._steps = StepWatch(llm)

    async def snapshot(self) -> Snapshot:
        """The figures as they are now."""
        return snapshot_of(self._llm, self._figures, await loop_lag())

    async def last_steps(self, count: int) -> list[StepRow]:
        """As `StepWatch.last`."""
        return await self._steps.last(count)


def snapshot_of(llm: AsyncLLM, requests: Figures, lag: float) -> Snapshot:
    """The figures of an engine in this process, with those of requests and of event loops."""
    return Snapshot(llm.is_healthy, llm.metrics(), llm.get_metrics(), requests, lag)


async def loop_lag() -> float:
    """Seconds that this event loop takes for all that waits for it now."""
    asked = time.monotonic()
    await asyncio.sleep(0)
    return time.monotonic() - asked
