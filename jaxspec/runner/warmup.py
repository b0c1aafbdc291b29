"""Warm-up: compiles programs before the requests that need them, so nothing compiles later."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import jax.stages
from tqdm import tqdm

from jaxspec.config import StepShapes
from jaxspec.plan import (
    EXPORT,
    MOVES,
    READ,
    READ_STATE,
    RESTORE,
    TABLES,
    WRITE,
    WRITE_STATE,
    Program,
    moves_of,
)
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.sampler import BIAS, Sampler, to_compile

Notice = Literal["bar", "line", "none"]
"""How people are told that programs compile: by a bar, by a line, or not at all."""
_OF_PREFIXES = {
    "export": "keeping a prefix",
    "restore": "beginning on a prefix",
    "read": "pages to the host",
    "write": "pages from the host",
    "read_state": "a state to the host",
    "write_state": "a state from the host",
}


def programs(shapes: StepShapes, samplers: Iterable[Sampler]) -> list[Program]:
    """Every program that plans can need, if their rows need no other samplers than these.

    They are those of the samplers that `to_compile` names. An engine of one row needs no `MOVES`:
    there is no second row to copy a state to.
    """
    kinds = to_compile(samplers)
    steps = dict.fromkeys(  # in order, each once
        Program(rows, tokens, sampler, num_steps, drafts)
        for sampler in kinds
        for rows, tokens, drafts in shapes.compiled()
        for num_steps in shapes.num_steps(tokens)
    )
    moves = dict.fromkeys(map(moves_of, kinds)) if shapes.max_num_seqs > 1 else ()
    tables = [TABLES] if any(BIAS in sampler for sampler in kinds) else []
    return [*steps, *moves, *tables, *_of_prefixes(shapes)]


def _of_prefixes(shapes: StepShapes) -> list[Program]:
    """What keeps prefixes, and lets requests begin on them."""
    if shapes.prefix_caching == "off":
        return []
    has_states = shapes.num_checkpoints > 0
    pieces = of_pieces(shapes) if shapes.host_bytes else []
    return [RESTORE, *([EXPORT] if has_states else []), *pieces]


def of_pieces(shapes: StepShapes) -> list[Program]:
    """What copies pages and states to the host's memory, and back."""
    return [READ, WRITE, *([READ_STATE, WRITE_STATE] if shapes.num_checkpoints else [])]


def warm_up(
    runner: ModelRunner,
    samplers: Iterable[Sampler],
    *,
    notice: Notice = "none",
    guard: Callable[[Callable[[], None]], None] = lambda run: run(),
    on_run: Callable[[Program, float], None] = lambda program, seconds: None,
) -> dict[str, float]:
    """Compile the `programs` of `samplers` that are not compiled yet, with a notice of them.

    Then they run on the state of `runner`. `guard` calls what does that: an interrupt loses the
    state. `on_run` hears what each of them took, on an empty plan.

    Returns the seconds that each took by its label. Some are compiled at the same time.
    """
    missing = [p for p in programs(runner.shapes, samplers) if not runner.is_warm(p)]
    if not missing:
        return {}
    # The label comes last: a narrow terminal cuts it off.
    layout = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
    cores = max(1, (os.cpu_count() or 1) - 1)  # besides the one that lowers
    pool = ThreadPoolExecutor(min(len(missing), cores), "jaxspec-compile")
    with _line(missing) if notice == "line" else contextlib.nullcontext():
        try:
            with tqdm(
                total=len(missing),
                desc="compiling",
                bar_format=layout,
                leave=False,
                disable=notice != "bar",
            ) as bar:
                seconds = _compile(runner, missing, pool, bar)
        finally:
            pool.shutdown(cancel_futures=True)
        # Not earlier: compiling for a GPU times kernels, and steps would disturb that.
        guard(lambda: _run(runner, missing, on_run))
    return seconds


@contextlib.contextmanager
def _line(missing: Sequence[Program]) -> Iterator[None]:
    """One line on standard error: what compiles, and in the end how long it took."""
    kinds = dict.fromkeys(str(program.sampler) for program in missing if program != MOVES)
    what = f" ({', '.join(kinds)})" if kinds else ""
    count = f"{len(missing)} program" + "s" * (len(missing) > 1)
    started, end = time.perf_counter(), "stopped after"
    print(f"jaxspec: compiling {count}{what}, once ... ", end="", file=sys.stderr, flush=True)
    try:
        yield
        end = "done in"
    finally:
        seconds = time.perf_counter() - started
        print(f"{end} {seconds:.1f} s", file=sys.stderr, flush=True)


def _run(
    runner: ModelRunner, compiled: Iterable[Program], on_run: Callable[[Program, float], None]
) -> None:
    for program in compiled:
        on_run(program, runner.warm_up(program))


def _compile(
    runner: ModelRunner, missing: Sequence[Program], pool: ThreadPoolExecutor, bar: tqdm
) -> dict[str, float]:
    """Lower one after the other, which is Python, while XLA compiles what is lowered."""
    compiling: dict[Program, Future[float]] = {}
    bar.set_postfix_str("tracing")
    with contextlib.closing(runner.trace_ahead(missing)) as traced:
        for program in traced:
            bar.set_postfix_str(_label(program))
            start = time.perf_counter()
            lowered = runner.lower(program)
            compiling[program] = pool.submit(_timed, lowered, time.perf_counter() - start)
    seconds = {}
    for program in missing:
        bar.set_postfix_str(_label(program))
        seconds[_label(program)] = compiling[program].result()
        bar.update()
    return seconds


def _timed(lowered: jax.stages.Lowered, seconds: float) -> float:
    """Compile; `seconds` and those that it took."""
    start = time.perf_counter()
    lowered.compile()
    return seconds + time.perf_counter() - start


def _label(program: Program) -> str:
    """A program as a person would name it: "8 rows, 3 drafts, 64 prompt tokens, greedy"."""
    if program == TABLES:
        return "tables of what a request forbids"
    if program.checkpoint != "none":
        return _OF_PREFIXES[program.checkpoint]
    if program.is_moves:
        return "copies of a prompt's state" + (program != MOVES) * " and counts"
    rows = f"{program.decode_rows} row" + "s" * (program.decode_rows > 1)
    drafts = f", {program.num_drafts} draft" + "s" * (program.num_drafts > 1)
    drafts = drafts if program.num_drafts else ""
    prompt = f", {program.prefill_tokens} prompt tokens" if program.prefill_tokens else ""
    steps = f", {program.num_steps} steps" if program.num_steps > 1 else ""
    return f"{rows}{drafts}{prompt}, {program.sampler}{steps}"
