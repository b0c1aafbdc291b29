"""Runs of the same requests by `LLM` in process and through HTTP, and what figures they make."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.engine import dummy_llm, traffic
from benchmarks.engine.dummy_llm import Figures
from benchmarks.engine.http_processes import Generator, Server
from benchmarks.measure import host_times
from benchmarks.measure.host_times import HostWatch
from jaxspec import LLM


@dataclasses.dataclass
class Run:
    """One run of all requests, however they came; seconds."""

    seconds: float
    tokens: int
    ttft: list[float]
    gaps: list[float]
    cpu: dict[str, float]  # of processors, by process and thread
    stages: host_times.Seconds
    lags: list[float] = dataclasses.field(default_factory=list)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def by_llm(llm: LLM, work: traffic.Work, at_once: int) -> Run:
    watch = HostWatch(llm.session.engine)
    watch.begin()
    served = traffic.serve(llm, work, at_once=at_once)
    told = watch.end()
    ttft = [metrics.ttft for metrics in served.metrics]
    tokens = sum(metrics.num_tokens for metrics in served.metrics)
    cpu = {"llm": told["cpu"]["all"]}
    return Run(served.seconds, tokens, ttft, served.gaps, cpu, told["stages"])


def by_http(
    server: Server,
    generator: Generator,
    work: traffic.Work,
    at_once: int,
    switch_ms: float | None = None,
) -> Run:
    server.begin(switch_ms)
    bodies = [body(prompt, tokens) for prompt, tokens in zip(*work, strict=True)]
    got = generator.load(server.port, bodies, at_once)
    told = server.end()
    if got["tokens"] != sum(work.tokens) or told["num_running"] or told["num_waiting"]:
        raise RuntimeError(f"Not all was served: {got['tokens']} of {sum(work.tokens)} tokens.")
    threads = told["cpu"]
    cpu = {
        "server": threads["all"],
        "event_loop": threads["MainThread"],
        "engine": threads["jaxspec-engine"],
        "generator": got.pop("cpu_seconds"),
    }
    return Run(**got, cpu=cpu, stages=told["stages"], lags=told["lags"])


def body(prompt: dict[str, list[int]], tokens: int) -> Figures:
    """A request as a client sends it."""
    return {
        "prompt": prompt["prompt_token_ids"],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def streamed(llm: LLM, prompt: dict[str, list[int]], tokens: int) -> float:
    """Seconds to the first piece of a stream, which is read to its end."""
    begin = time.monotonic()
    pieces = llm.stream(prompt, dummy_llm.greedy(tokens))
    next(pieces)
    seconds = time.monotonic() - begin
    for _ in pieces:
        pass
    return seconds


def figures_of(runs: Sequence[Run]) -> Figures:
    """Speeds and processors of the run in the middle; waits and stages of all runs together."""
    by_speed = sorted(runs, key=lambda run: run.speed)
    middle = by_speed[len(runs) // 2]
    waits = {name: [x for run in runs for x in getattr(run, name)] for name in ("ttft", "gaps")}
    lags = [x for run in runs for x in run.lags]
    return {
        "output_tokens_per_second": middle.speed,
        "output_tokens_per_second_least": by_speed[0].speed,
        "output_tokens_per_second_most": by_speed[-1].speed,
        **percentiles("ttft", waits["ttft"]),
        **percentiles("gap", waits["gaps"]),
        **percentiles("loop_lag", lags),
        **host_times.figures(run.stages for run in runs),
        "processors": {name: cpu / middle.seconds for name, cpu in middle.cpu.items()},
        "portions": len(middle.ttft) + len(middle.gaps),
        "dispatches": sum(len(run.stages["plan"]) for run in runs),
    }


def percentiles(name: str, seconds: Sequence[float]) -> Figures:
    if not seconds:
        return {}
    middle, late = 1000 * np.percentile(seconds, (50, 99))
    return {f"{name}_ms_p50": float(middle), f"{name}_ms_p99": float(late)}
