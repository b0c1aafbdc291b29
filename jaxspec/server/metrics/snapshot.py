"""Snapshots of all metrics of a server."""

import asyncio
import time
from typing import Any, NamedTuple, Protocol

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.engine.metrics import Metric
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.step_watch import StepWatch
from jaxspec.viz.timeline import StepRow


class Snapshot(NamedTuple):
    """Metrics of the engine and the server at one moment."""

    is_healthy: bool
    engine: dict[str, Any]  # as `AsyncLLM.metrics`
    by_vllm: list[Metric]  # as `AsyncLLM.get_metrics`
    requests: ServerMetrics  # total of all API processes
    loop_lag: float  # seconds; maximum over the processes' event loops


class Watch(Protocol):
    """Interface of the routes to the metrics."""

    async def snapshot(self) -> Snapshot:
        """Return the current metrics."""
        ...

    async def last_steps(self, count: int) -> list[StepRow]:
        """Return the last `count` steps, as `StepWatch.last`."""
        ...


class LocalWatch:
    """A `Watch` of an engine in this process."""

    def __init__(self, llm: AsyncLLM, metrics: ServerMetrics):
        self._llm, self._metrics = llm, metrics
        self._steps = StepWatch(llm)

    async def snapshot(self) -> Snapshot:
        return await snapshot_of(self._llm, self._metrics, await loop_lag())

    async def last_steps(self, count: int) -> list[StepRow]:
        return await self._steps.last(count)


async def snapshot_of(llm: AsyncLLM, requests: ServerMetrics, lag: float) -> Snapshot:
    engine, by_vllm = await llm.snapshot()
    return Snapshot(llm.is_healthy, engine, by_vllm, requests, lag)


async def loop_lag() -> float:
    """Return the seconds that this event loop takes to run all tasks that are ready now."""
    asked = time.monotonic()
    await asyncio.sleep(0)
    return time.monotonic() - asked
