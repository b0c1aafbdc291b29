"""Warm-up: compiles programs before the requests that need them, so nothing compiles later."""

import functools
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax.stages
from tqdm import tqdm

from jaxspec.config import Buckets, Variant
from jaxspec.plan import MOVES, Program
from jaxspec.runner.model_runner import ModelRunner

_Job = tuple[str, Callable[[], jax.stages.Lowered], Callable[[], None]]  # words, lower, run


def programs(buckets: Buckets, variants: Iterable[Variant]) -> list[Program]:
    """Every program that plans of these sampling variants can need; one row moves nothing."""
    steps = [
        Program(rows, tokens, variant, num_steps)
        for variant in variants
        for rows, tokens in buckets.shapes()
        for num_steps in buckets.num_steps(tokens)
    ]
    return [*steps, MOVES] if buckets.max_num_seqs > 1 else steps


def warm_up(
    runner: ModelRunner, variants: Iterable[Variant], *, progress: bool = False
) -> dict[str, float]:
    """Compile what `variants` need and is not compiled yet, behind a bar that says which.

    Returns the seconds that each took, side by side with others, by what a person would name it.
    """
    jobs = _jobs(runner, variants)
    if not jobs:
        return {}
    # The words come last: they are what a narrow terminal cuts off.
    layout = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
    others = max(1, (os.cpu_count() or 1) - 1)  # cores besides the one that lowers
    pool = ThreadPoolExecutor(min(len(jobs), others), "jaxspec-compile")
    try:
        with tqdm(
            total=len(jobs), desc="compiling", bar_format=layout, leave=False, disable=not progress
        ) as bar:
            seconds = _compile(jobs, pool, bar)
    finally:
        pool.shutdown(cancel_futures=True)
    # Not earlier: compiling for a GPU times kernels, and steps would disturb that.
    for _, _, run in jobs:
        run()
    return seconds


def _jobs(runner: ModelRunner, variants: Iterable[Variant]) -> list[_Job]:
    missing = [p for p in programs(runner.buckets, variants) if not runner.is_warm(p)]
    return [
        (
            _words(program),
            functools.partial(runner.lower, program),
            functools.partial(runner.warm_up, program),
        )
        for program in missing
    ]


def _compile(jobs: list[_Job], pool: ThreadPoolExecutor, bar: tqdm) -> dict[str, float]:
    """Lower one after the other, which is Python, while XLA compiles what is lowered."""
    compiling: dict[str, Future[float]] = {}
    for words, lower, _ in jobs:
        bar.set_postfix_str(words)
        begin = time.perf_counter()
        lowered = lower()
        compiling[words] = pool.submit(_timed, lowered, time.perf_counter() - begin)
    seconds = {}
    for words, future in compiling.items():
        bar.set_postfix_str(words)
        seconds[words] = future.result()
        bar.update()
    return seconds


def _timed(lowered: jax.stages.Lowered, before: float) -> float:
    begin = time.perf_counter()
    lowered.compile()
    return before + time.perf_counter() - begin


def _words(program: Program) -> str:
    """A program as a person would name it: "8 rows, 64 prompt tokens, greedy"."""
    if program == MOVES:
        return "copies of a prompt's state"
    rows = f"{program.decode_rows} row" + "s" * (program.decode_rows > 1)
    prompt = f", {program.prefill_tokens} prompt tokens" if program.prefill_tokens else ""
    steps = f", {program.num_steps} steps" if program.num_steps > 1 else ""
    return f"{rows}{prompt}, {program.variant}{steps}"
