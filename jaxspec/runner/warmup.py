"""Lists of an engine's programs, and `warm_up`, which compiles and runs them."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import jax.stages
from tqdm import tqdm

from jaxspec.plan.plan import (
    AUTOMATON,
    EXPORT,
    MASKS,
    MOVES,
    PROCESSOR_ARGS,
    READ,
    READ_STATE,
    RESTORE,
    TABLES,
    WRITE,
    WRITE_STATE,
    WRITES,
    AfterForwardPass,
    AnyProgram,
    ForwardPass,
    Program,
)
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.sampling_features import (
    BIAS,
    EVERYTHING,
    LADDER,
    PROMPT_LOGPROBS,
    TOP_K,
    SamplingFeatures,
    to_compile,
)
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.programs.kernels import compile_kernels
from jaxspec.runner.programs.trace_processes import num_cores

Notice = Literal["bar", "line", "none"]
"""How compilation is reported: by a progress bar, by a line on standard error, or not at all."""
_BETWEEN_STEPS = {
    MOVES: "copies of a prompt's state",
    RESTORE: "beginning on a prefix",
    TABLES: "tables of what a request forbids",
    MASKS: "masks of a grammar",
    AUTOMATON: "automaton of a grammar",
    PROCESSOR_ARGS: "arguments of logits processors",
    EXPORT: "keeping a prefix",
    READ: "pages to the host",
    WRITE: "pages from the host",
    READ_STATE: "a state to the host",
    WRITE_STATE: "a state from the host",
}


def programs(
    shapes: StepShapes, limits: SchedulerLimits, feature_sets: Iterable[SamplingFeatures]
) -> list[AnyProgram]:
    """Return all programs that plans of requests with these feature sets can use.

    They are those of `to_compile(feature_sets)`; programs with prompts have no TOP_K rung.
    """
    rungs = to_compile(feature_sets)
    halves = _halves(shapes) if any(BIAS in rung for rung in rungs) else ()
    return [*_steps(shapes, rungs), *halves, *_between_steps(shapes, limits)]


def first_programs(shapes: StepShapes, limits: SchedulerLimits) -> list[AnyProgram]:
    """Return the smallest list of programs that can run any request.

    It has one decode and one prefill program, of the largest size and with all sampling features,
    and those that run between steps.
    """
    return [*_first_steps(shapes), *_between_steps(shapes, limits)]


def _first_steps(shapes: StepShapes) -> list[Program]:
    rows, drafts = shapes.max_num_seqs, shapes.num_drafts
    return [
        Program(rows, 0, EVERYTHING, 1, drafts),
        Program(rows, shapes.prefill_tokens[-1], LADDER[-1], 1, drafts),
    ]


def later_programs(
    shapes: StepShapes, first: Iterable[SamplingFeatures] = ()
) -> list[Program | ForwardPass]:
    """Return the ladder's programs other than `first_programs`, the most useful ones first.

    The halves of steps, which only rows masked by the host use, come last.

    Args:
        shapes: Sizes of the engine's programs.
        first: Rungs of the ladder to put before the others.
    """
    there, wanted = set(_first_steps(shapes)), set(first)
    order = sorted(LADDER, key=lambda each: (each not in wanted, LADDER.index(each)))
    whole = [program for program in _steps(shapes, order) if program not in there]
    return [*whole, *_halves(shapes)]


def _halves(shapes: StepShapes) -> Iterator[Program | ForwardPass]:
    for rows in reversed(shapes.decode_rows):
        first = ForwardPass(rows, shapes.num_drafts)
        yield from (first, first.rest)


def _steps(shapes: StepShapes, feature_sets: Iterable[SamplingFeatures]) -> list[Program]:
    return list(
        dict.fromkeys(  # unique, in order
            Program(rows, tokens, _of_prompts(features) if tokens else features, num_steps, drafts)
            for features in feature_sets
            for rows, tokens, drafts in _shapes_of(shapes, features)
            for num_steps in shapes.num_steps(tokens)
        )
    )


def _of_prompts(features: SamplingFeatures) -> SamplingFeatures:
    """Return the features of steps with prompts, in which TOP_K would save little time."""
    return EVERYTHING if features == TOP_K else features


def _shapes_of(shapes: StepShapes, features: SamplingFeatures) -> list[tuple[int, int, int]]:
    """Return the compiled shapes; prompt logprobs are rare and have only one prefill size."""
    if PROMPT_LOGPROBS not in features:
        return shapes.compiled()
    largest = shapes.max_num_seqs, shapes.prefill_tokens[-1]
    return [shape for shape in shapes.compiled() if not shape[1] or shape[:2] == largest]


def _between_steps(shapes: StepShapes, limits: SchedulerLimits) -> list[AnyProgram]:
    """Return the programs between steps; an engine of one row needs no moves."""
    found: list[AnyProgram] = [MOVES] if shapes.max_num_seqs > 1 else []
    found += [each for each in WRITES if each != PROCESSOR_ARGS or shapes.processor_tokens]
    if limits.caches_prefixes:
        found += [RESTORE, *([EXPORT] if shapes.num_checkpoints else [])]
        found += of_blocks(shapes) if limits.host_bytes else []
    return found


def of_blocks(shapes: StepShapes) -> list[AnyProgram]:
    """Return the programs that copy blocks between the pools and host memory."""
    return [READ, WRITE, *([READ_STATE, WRITE_STATE] if shapes.num_checkpoints else [])]


def warm_up(
    runner: ModelRunner,
    wanted: Iterable[AnyProgram],
    *,
    notice: Notice = "none",
    guard: Callable[[Callable[[], object]], object] = lambda run: run(),
    on_run: Callable[[Program, float], None] = lambda program, seconds: None,
) -> dict[str, float]:
    """Compile the `wanted` programs that are not compiled yet, and run each of them.

    Args:
        runner: Compiles the programs and runs them on empty plans, which do not change its state.
        wanted: The programs.
        notice: How to report the compilation.
        guard: Calls the function that runs the programs; an interrupt then loses the state.
        on_run: Called with each program and the seconds of an empty run.

    Returns:
        Compile times in seconds by program label. Several programs compile concurrently.
    """
    missing = [program for program in wanted if not runner.is_warm(program)]
    if not missing:
        return {}
    # The label is last, so that a narrow terminal truncates only it.
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
        # Run only after all compiling: compilers time GPU kernels, which steps would disturb.
        guard(lambda: _run(runner, missing, on_run))
    return seconds


@contextlib.contextmanager
def _line(missing: Sequence[AnyProgram]) -> Iterator[None]:
    """Print one line to standard error: the programs, and finally the time."""
    kinds = dict.fromkeys(
        str(program.features) for program in missing if isinstance(program, Program)
    )
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
    runner: ModelRunner, compiled: Iterable[AnyProgram], on_run: Callable[[Program, float], None]
) -> None:
    for program in compiled:
        seconds = runner.warm_up(program)
        if isinstance(program, Program):
            on_run(program, seconds)


def _compile(
    runner: ModelRunner, missing: Sequence[AnyProgram], pool: ThreadPoolExecutor, bar: tqdm
) -> dict[str, float]:
    """Lower programs one after another (Python) while XLA compiles the lowered ones."""
    compiling: dict[AnyProgram, Future[float]] = {}
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
    """Compile the program, and return `seconds` plus the compile time.

    A program that is not new is in the program cache, and its executable most likely in JAX's
    compilation cache.
    """
    start = time.perf_counter()
    if is_new:
        compile_kernels(lowered)
    lowered.compile()
    return seconds + time.perf_counter() - start


def label(program: AnyProgram) -> str:
    """Return a readable label: "8 rows, 3 drafts, 64 prompt tokens, greedy"."""
    if isinstance(program, ForwardPass):
        return f"forward pass of {label(program.rest)}"
    if not isinstance(program, Program):
        return _BETWEEN_STEPS[program]
    half = "rest of " if isinstance(program, AfterForwardPass) else ""
    rows = f"{program.decode_rows} row" + "s" * (program.decode_rows > 1)
    drafts = f", {program.num_drafts} draft" + "s" * (program.num_drafts > 1)
    drafts = drafts if program.num_drafts else ""
    prompt = f", {program.prefill_tokens} prompt tokens" if program.prefill_tokens else ""
    steps = f", {program.num_steps} steps" if program.num_steps > 1 else ""
    return f"{half}{rows}{drafts}{prompt}, {program.features}{steps}"
