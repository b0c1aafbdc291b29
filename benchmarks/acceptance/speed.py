"""Milliseconds per token with each feature, and what its first request costs it and others."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.acceptance.features import (
    FULL_TABLE,
    GREEDY,
    PROCESSED,
    SHORT_TABLE,
    Feature,
    params_of,
    samples_of,
    violation,
)
from benchmarks.acceptance.job import Row, Rows, ready
from benchmarks.acceptance.models import ALL_MODELS, config_of, folder_of
from benchmarks.acceptance.watch import Companion, CompileEvents, milliseconds
from jaxspec import LLM, RequestMetrics, RequestOutput

FIRST_TOKENS = 4
REPEATS = 2
# Requests of an option that are not greedy ones, and their programs.
USES = {"logits processors": (PROCESSED, ["greedy", "everything"])}
SHORT_PROMPT = 64  # of the batches that are timed: the other processes wait for them


class Bench:
    """An engine, and random prompts without common prefixes."""

    def __init__(self, llm: LLM, rows: Rows):
        self.llm, self.sizes, self.alone = llm, rows.job.sizes, rows.alone
        self._rng = np.random.default_rng(0)

    def prompts(self, count: int, length: int | None = None) -> list[dict[str, list[int]]]:
        ids = self._rng.integers(0, self.llm.vocab_size, (count, length or self.sizes.prompt))
        return [{"prompt_token_ids": row} for row in ids.tolist()]

    def run(self, feature: Feature, tokens: int, count: int | None = None) -> "Run":
        """Complete `count` prompts, or as many as fill all rows with short prompts.

        Raises:
            ValueError: an output lacks what its request asks for.
        """
        length = self.sizes.prompt if count else min(SHORT_PROMPT, self.sizes.prompt)
        count = count or max(1, self.sizes.rows // samples_of(feature))
        params = params_of(feature, count, tokens, self.llm.get_default_sampling_params())
        prompts = self.prompts(count, length)
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        run = Run(time.perf_counter() - start, outputs)
        for each, output in zip(params, outputs, strict=True):
            if why := violation(each, output, self.llm.vocab_size):
                raise ValueError(f"The output has {why}, and was asked for by {each}.")
        return run

    def first_requests(self, feature: Feature) -> Row:
        """Time the first request with a feature and a second one, while a greedy stream runs."""
        (prompt,) = self.prompts(1)
        tokens = self.sizes.longest - self.sizes.prompt
        with self.alone(), Companion(self.llm, prompt["prompt_token_ids"], tokens) as stream:
            first = self.run(feature, FIRST_TOKENS, 1).seconds
            again = self.run(feature, FIRST_TOKENS, 1).seconds
        return milliseconds(first=first, again=again, largest_gap=stream.largest_gap)

    def speed(self, feature: Feature, repeats: int = REPEATS) -> Row:
        """Return milliseconds per token and row of the fastest repeat."""
        tokens = self.sizes.tokens
        with self.alone():
            first = self.run(feature, 1)
            runs = [self.run(feature, 1 + tokens) for _ in range(repeats)]
        times = [
            (run.seconds - first.seconds) / (run.tokens_per_sample - 1)
            for run in runs
            if run.tokens_per_sample > 1.5
        ]
        total = RequestMetrics.total([output.metrics for run in runs for output in run.outputs])
        return {
            **({"ms_per_token": 1000 * min(times)} if times else {}),
            "tokens_per_sample": runs[-1].tokens_per_sample,
            "tokens_per_step": total.tokens_per_step,
        }


class Run:
    """The outputs of a call, and its seconds."""

    def __init__(self, seconds: float, outputs: list[RequestOutput]):
        self.seconds, self.outputs = seconds, outputs

    @property
    def tokens_per_sample(self) -> float:
        samples = [sample for output in self.outputs for sample in output.outputs]
        return sum(len(sample.token_ids) for sample in samples) / len(samples)


def features(rows: Rows) -> None:
    """Add a row per feature of the model's table."""
    _features(rows, FULL_TABLE if ALL_MODELS[rows.job.model].has_all else SHORT_TABLE)


def short_features(rows: Rows) -> None:
    """Add a row per feature that every model has, with the options of the part."""
    _features(rows, SHORT_TABLE)


def _features(rows: Rows, table: Sequence[Feature]) -> None:
    job = rows.job
    config = config_of(job.model, is_small=job.is_small)
    with folder_of(job.model, config) as folder:
        llm, figures = ready(folder, job.options(folder))
        rows.add("ready", **figures, implementations=llm.metrics()["implementations"])
        bench, events = Bench(llm, rows), CompileEvents()
        for feature in table:
            rows.measure(feature.name, functools.partial(_feature, bench, events, feature))
        events.close()


def _feature(bench: Bench, events: CompileEvents, feature: Feature) -> Row:
    events.take()
    figures = {**bench.first_requests(feature), **bench.speed(feature)}
    heard = events.take()
    if count := heard["compiled_in_calls"]:
        heard["error"] = f"{count} programs were traced or compiled while a request waited."
    return figures | heard


def option(rows: Rows) -> None:
    """Add the row of greedy requests, or those that use it, with an option of the engine."""
    job = rows.job
    feature, kinds = USES.get(job.part, (GREEDY, ["greedy"]))
    with folder_of(job.model, config_of(job.model, is_small=job.is_small)) as folder:

        def measure() -> dict[str, Any]:
            llm, figures = ready(folder, job.options(folder), kinds)
            bench = Bench(llm, rows)
            bench.run(feature, FIRST_TOKENS)  # what only the first requests cost is no speed
            return figures | bench.speed(feature)

        rows.measure(feature.name, measure, needs=20.0)
