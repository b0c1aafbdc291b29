"""Metrics of an engine and of requests at one moment."""

import asyncio
import time

from jaxspec.engine.metrics import EngineSnapshot
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.snapshot import LocalWatch, loop_lag


class Llm:
    is_healthy = False

    num_replicas = 1

    async def snapshot(self):
        return EngineSnapshot({"num_steps": 3}, ["a metric"])


def test_a_snapshot_is_what_the_engine_says_then():
    metrics = ServerMetrics()
    found = asyncio.run(LocalWatch(Llm(), metrics).snapshot())
    assert found[:4] == (False, {"num_steps": 3}, ["a metric"], metrics)
    assert 0 <= found.loop_lag < 5


def test_the_lag_of_a_loop_is_the_time_of_what_waits_for_it():
    async def run():
        asyncio.get_running_loop().call_soon(time.sleep, 0.05)
        return await loop_lag()

    assert asyncio.run(run()) >= 0.05
