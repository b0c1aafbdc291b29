"""The line of the log that says how fast the engine is."""

import asyncio

import pytest
from clock import set_clock

from jaxspec.engine.metrics import Counter, EngineSnapshot
from jaxspec.server.metrics import throughput_log
from jaxspec.server.metrics.throughput_log import ThroughputLog, logging_throughput
from jaxspec.server.options import ServerOptions

NAMES = {
    "vllm:generation_tokens": "tokens",
    "vllm:prefix_cache_queries": "queries",
    "vllm:prefix_cache_hits": "hits",
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


class Engine:
    """Counters that the test sets."""

    is_healthy = True

    def __init__(self):
        self.counts = dict.fromkeys(("prompt_tokens", *NAMES.values()), 0)
        self.running = 0

    def metrics(self):
        return {
            "num_running": self.running,
            "num_waiting": 0,
            "kv_cache_usage": 0.25,
            "num_prompt_tokens": self.counts["prompt_tokens"],
        }

    def snapshot(self):
        by_vllm = [Counter(name, {}, self.counts[own]) for name, own in NAMES.items()]
        return EngineSnapshot(self.metrics(), by_vllm)


class Served(Engine):
    async def snapshot(self):
        return super().snapshot()


def test_an_idle_engine_says_nothing_and_a_busy_one_what_came_since(monkeypatch):
    now = [100.0]
    set_clock(monkeypatch, throughput_log, monotonic=lambda: now[0])
    engine = Engine()
    log = ThroughputLog(engine.snapshot())
    assert log.line(engine.snapshot()) is None
    engine.counts |= {"prompt_tokens": 500, "tokens": 200, "queries": 100, "hits": 40}
    engine.counts |= {"drafts": 50, "accepted": 100}
    engine.running, now[0] = 3, 110.0
    line = log.line(engine.snapshot())
    for part in ("50.0 tokens/s", "20.0 tokens/s", "running 3", "25.0%", "40.0%", "3.00"):
        assert part in line
    engine.running, now[0] = 0, 120.0
    assert "running 0" in log.line(engine.snapshot()), "the end of the load is logged once"
    now[0] = 130.0
    assert log.line(engine.snapshot()) is None


@pytest.mark.parametrize("is_on", [True, False])
def test_the_line_is_logged_while_it_serves(is_on):
    engine, lines = Served(), []

    async def serve():
        with logging_throughput(engine, ServerOptions(throughput_log=is_on), lines.append, 0.01):
            await asyncio.sleep(0.02)
            engine.counts["tokens"] = 7
            await asyncio.sleep(0.1)

    asyncio.run(serve())
    assert bool(lines) == is_on
