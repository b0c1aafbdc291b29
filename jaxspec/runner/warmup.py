"""Warm-up: compiles programs before the requests that need them, so nothing compiles later."""

import functools
from collections.abc import Callable, Iterable

from tqdm import tqdm

from jaxspec.config import Buckets, Variant
from jaxspec.plan import Program
from jaxspec.runner.model_runner import ModelRunner


def programs(buckets: Buckets, variants: Iterable[Variant]) -> list[Program]:
    """Every program that steps of these sampling variants can need."""
    return [Program(*shape, variant) for variant in variants for shape in buckets.shapes()]


def warm_up(runner: ModelRunner, variants: Iterable[Variant], *, progress: bool = False) -> None:
    """Compile what `variants` need and is not compiled yet, behind a bar that says which."""
    missing = [p for p in programs(runner.buckets, variants) if not runner.is_warm(p)]
    if not missing:
        return
    jobs: list[tuple[str, Callable[[], None]]] = [
        (_words(program), functools.partial(runner.warm_up, program)) for program in missing
    ]
    if runner.buckets.max_num_seqs > 1:
        jobs.append(("copies of a prompt's state", runner.warm_up_fork))
    # The words come last: they are what a narrow terminal cuts off.
    layout = "{desc} {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
    with tqdm(
        total=len(jobs), desc="compiling", bar_format=layout, leave=False, disable=not progress
    ) as bar:
        for words, compile_it in jobs:
            bar.set_postfix_str(words)
            compile_it()
            bar.update()


def _words(program: Program) -> str:
    """A program as a person would name it: "8 rows, 64 prompt tokens, greedy"."""
    rows = f"{program.decode_rows} row" + "s" * (program.decode_rows > 1)
    prompt = f", {program.prefill_tokens} prompt tokens" if program.prefill_tokens else ""
    return f"{rows}{prompt}, {program.variant}"
