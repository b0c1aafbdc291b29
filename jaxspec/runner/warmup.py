"""Warm-up: compiles programs before the requests that need them, so nothing compiles later."""

import contextlib
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
)
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.programs.kernels import compile_kernels
from jaxspec.runner.programs.trace_processes import num_cores
from jaxspec.sampler import EVERYTHING, LADDER, PROMPT_LOGPROBS, TOP_K, Sampler, to_compile

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
    """Return every program that plans can need, if their rows need no other samplers than these.

    They are those of the samplers that `to_compile` names; prompts have no TOP_K rung.
    """
    return [*_steps(shapes, to_compile(samplers)), *_between_steps(shapes)]


def first_programs(shapes: StepShapes) -> list[Program]:
    """Return the fewest programs that can run any request.

    One decodes and one reads prompts, both of the largest size and with every sampling feature.
    """
    rows, drafts = shapes.max_num_seqs, shapes.num_drafts
    return [
        Program(rows, 0, EVERYTHING, 1, drafts),
        Program(rows, shapes.prefill_tokens[-1], LADDER[-1], 1, drafts),
        *_between_steps(shapes),
    ]


def later_programs(shapes: StepShapes, first: Iterable[Sampler] = ()) -> list[Program]:
    """Return the programs of the ladder that are no `first_programs`, the most useful ones first.

    Args:
        shapes: The sizes of the engine's programs.
        first: Rungs of the ladder whose programs come before the others.
    """
    there, wanted = set(first_programs(shapes)), set(first)
    order = sorted(LADDER, key=lambda each: (each not in wanted, LADDER.index(each)))
    return [program for program in _steps(shapes, order) if program not in there]


def _steps(shapes: StepShapes, samplers: Iterable[Sampler]) -> list[Program]:
    return list(
        dict.fromkeys(  # in order, each once
            Program(rows, tokens, _of_prompts(sampler) if tokens else sampler, num_steps, drafts)
            for sampler in samplers
            for rows, tokens, drafts in _shapes_of(shapes, sampler)
            for num_steps in shapes.num_steps(tokens)
        )
    )


def _of_prompts(sampler: Sampler) -> Sampler:
    """Return the sampler of steps with prompts, in which TOP_K would save little time."""
    return EVERYTHING if sampler == TOP_K else sampler


def _shapes_of(shapes: StepShapes, sampler: Sampler) -> list[tuple[int, int, int]]:
    """Return the compiled shapes; logprobs of prompts are rare, so one size of prompts does."""
    if PROMPT_LOGPROBS not in sampler:
        return shapes.compiled()
    largest = shapes.max_num_seqs, shapes.prefill_tokens[-1]
    return [shape for shape in shapes.compiled() if not shape[1] or shape[:2] == largest]


def _between_steps(shapes: StepShapes) -> list[Program]:
    """Return what moves rows and writes tables; an engine of one row has no row to copy to."""
    moves = [MOVES] if shapes.max_num_seqs > 1 else []
    return [*moves, TABLES, *_of_prefixes(shapes)]


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
    wanted: Iterable[Program],
    *,
    notice: Notice = "none",
    guard: Callable[[Callable[[], object]], object] = lambda run: run(),
    on_run: Callable[[Program, float], None] = lambda program, seconds: None,
) -> dict[str, float]:
    """Compile those of the `wanted` programs that are not compiled yet, and run each.

    Args:
        runner: Compiles them, and runs them on its state, which they leave as it is.
        wanted: The programs.
        notice: How people are told.
        guard: Calls what runs the programs: an interrupt loses the state.
        on_run: Is called with each program and the seconds of an empty run.

    Returns:
        Seconds of compiling by the label of each program. Several compile at the same time.
    """
    missing = [program for program in wanted if not runner.is_warm(program)]
    if not missing:
        return {}
    # The label comes last: a narrow terminal cuts it off.
    layout = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
    pool = ThreadPoolExecutor(min(len(missing), num_cores()), "jaxspec-compile")
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
    kinds = dict.fromkeys(str(program.sampler) for program in missing if program.num_steps)
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
    new = {program for program in missing if not runner.is_kept(program)}
    bar.set_postfix_str("tracing")
    with contextlib.closing(runner.trace_ahead(missing)) as traced:
        for program in traced:
            bar.set_postfix_str(label(program))
            start = time.perf_counter()
            lowered = runner.lower(program)
            compiling[program] = pool.submit(
                _timed, lowered, time.perf_counter() - start, program in new
            )
    seconds = {}
    for program in missing:
        bar.set_postfix_str(label(program))
        seconds[label(program)] = compiling[program].result()
        bar.update()
    return seconds


def _timed(lowered: jax.stages.Lowered, seconds: float, is_new: bool) -> float:
    """Compile the program, and return `seconds` plus the seconds of compiling.

    A program that is not new was kept on disk, and XLA's executable most likely beside it.
    """
    start = time.perf_counter()
    if is_new:
        compile_kernels(lowered)
    lowered.compile()
    return seconds + time.perf_counter() - start


def label(program: Program) -> str:
    """A program as a person would name it: "8 rows, 3 drafts, 64 prompt tokens, greedy"."""
    if program == TABLES:
        return "tables of what a request forbids"
    if program.checkpoint != "none":
        return _OF_PREFIXES[program.checkpoint]
    if program.is_moves:
        return "copies of a prompt's state"
    rows = f"{program.decode_rows} row" + "s" * (program.decode_rows > 1)
    drafts = f", {program.num_drafts} draft" + "s" * (program.num_drafts > 1)
    drafts = drafts if program.num_drafts else ""
    prompt = f", {program.prefill_tokens} prompt tokens" if program.prefill_tokens else ""
    steps = f", {program.num_steps} steps" if program.num_steps > 1 else ""
    return f"{rows}{drafts}{prompt}, {program.sampler}{steps}"
